"""Which tests are deep: `make test` leaves them out, `make test-deep` runs them alone.

Deep is what takes minutes and a change to serving, model, training or an op's contract seldom
breaks: kernels emulated instruction by instruction, interpreted over many shapes, or compiled for
an H200; whole steps at full depth; programs that measure on a GPU, run dry; long end-to-end runs.
Of an op's contract suite, `make test` interprets the kernel in the first tests alone. Every golden
model is held to its logits there, one a family and the mixed one to what they generate, too.
"""

DEEP_FILES = {
    "tests/deploy/test_image_runs.py",
    "tests/e2e/test_asynchronous_faults.py",
    "tests/e2e/test_asynchronous_ray.py",
    "tests/e2e/test_family_hostile.py",
    "tests/e2e/test_hostile_script.py",
    "tests/e2e/test_hosts.py",
    "tests/e2e/test_kserve_clients.py",
    "tests/e2e/test_page_in_browser.py",
    "tests/e2e/test_readme.py",
    "tests/e2e/test_stopped_process.py",
    "tests/jmoe/test_compile_h200.py",
    "tests/jmoe/test_compile_mixed_h200.py",
    "tests/jmoe/test_kernels_emulated.py",
    "tests/jmoe/test_pages.py",
    "tests/jmoe/parallel/test_compile_eight_h200.py",
    "tests/pallas_kernels/test_grouped_gemm_mosaic.py",
    "tests/pallas_kernels/test_kv_write_mosaic.py",
    "tests/pallas_kernels/test_odd_shapes.py",
    "tests/pallas_kernels/test_paged_attention_mosaic.py",
    "tests/pallas_kernels/test_planning_mosaic.py",
    "tests/pallas_kernels/test_prefill_attention_mosaic.py",
    "tests/pallas_kernels/test_routing_mosaic.py",
    "tests/pallas_kernels/test_past_2_31.py",
    "tests/serving/execution/test_aep_port_processes.py",
    "tests/serving/frontend/test_openai_agent.py",
    "tests/benchmarks/test_family_qos_run.py",
    "tests/benchmarks/test_gpu_benchmark_dry.py",
    "tests/benchmarks/test_kernel_benchmark.py",
    "tests/benchmarks/test_kernel_benchmark_run.py",
    "tests/training/test_accuracy_benchmark.py",
    "tests/training/test_consolidate_runs.py",
    "tests/training/test_distill_h200.py",
    "tests/training/test_distill_measured.py",
    "tests/training/test_distill_page.py",
    "tests/training/test_distill_runs.py",
    "tests/training/test_evaluation_runs.py",
    "tests/training/test_family_quality.py",
}
DEEP_FOLDERS = ("tests/sm90/",)
DEEP_TESTS = {
    "tests/serving/test_mixed_served.py::test_who_refuses_brownout_is_exact_beside_others_models",
    "tests/benchmarks/test_aep_simulator.py::test_one_worker_of_each_kind_and_one_layer",
    "tests/jmoe/test_parts.py::test_the_program_for_parts_is_the_one_without[qwen2_moe]",
    "tests/jmoe/test_cut.py::"
    "test_the_fused_stage_has_the_bits_of_the_stages_it_is_made_of[qwen2_moe]",
    "tests/serving/execution/test_programs.py::"
    "test_a_policy_that_never_parks_needs_no_programs_for_parts",
    "tests/serving/test_host_experts_served.py::"
    "test_passes_of_a_token_are_bounded_by_the_moe_layers",
    "tests/jmoe/test_mixed.py::test_rows_are_those_of_each_model_alone[padding]",
    "tests/jmoe/test_generate.py::test_tokens_and_degraded_visits_equal_loops[full40]",
    "tests/jmoe/test_cut.py::test_half_layers_one_by_one_are_the_whole[qwen2_moe]",
    *(
        f"tests/serving/execution/test_aep_workers.py::{test}"
        for test in (
            "test_tokens_are_the_whole_models_in_any_order[qwen2_moe-2-3-16]",
            "test_tokens_are_the_whole_models_in_any_order[mixtral-1-1-16]",
            "test_tokens_are_the_whole_models_in_any_order[qwen3_moe_mixed_yarn-2-2-16]",
            "test_brownout_to_nothing_and_rows_that_refuse_it[False]",
            "test_brownout_to_nothing_and_rows_that_refuse_it[True]",
            "test_experts_that_several_workers_have_take_turns",
            "test_groups_of_experts_are_launched_by_themselves",
            *(
                f"test_without_a_worker_its_experts_visits_go_where_brownout_lets_them[{strategy}]"
                for strategy in ("zero", "full", "partial")
            ),
            "test_under_brownout_tokens_are_those_of_the_plans_that_stages_made",
            "test_sampled_tokens_are_those_of_generate",
            "test_workers_on_devices_of_their_own",
        )
    ),
    "tests/serving/execution/test_aep_schedules.py::"
    "test_any_schedule_writes_what_is_reckoned_by_hand[more]",
    "tests/serving/test_shaped.py::test_shaped_rows_over_a_mesh",
    "tests/serving/test_prefix_reuse.py::test_many_more",
    "tests/serving/test_prefix_served.py::test_many_more",
    "tests/serving/test_shaped.py::test_tokens_are_those_of_changed_logits[evictions]",
    "tests/serving/test_asynchronous_served.py::test_many_at_once_get_what_the_model_writes",
    "tests/serving/test_asynchronous_served.py::test_prompts_are_scored_beside_others",
    "tests/serving/test_host_experts_served.py::"
    "test_who_refuses_gets_what_a_difference_makes_of_a_siblings_expert",
    "tests/jmoe/test_cut.py::"
    "test_two_parts_are_the_whole_wherever_it_is_cut[qwen3_moe_mixed_yarn-False]",
    "tests/serving/test_family_served.py::test_answers_are_those_of_each_model_alone[2]",
    "tests/serving/test_host_experts_served.py::"
    "test_who_refuses_brownout_gets_its_models_experts[changes1]",
    "tests/pallas_kernels/test_routing.py::test_route_is_its_parts[mosaic-zero-softmax-20_0]",
    "tests/jmoe/test_parts.py::"
    "test_a_program_for_each_part_is_the_whole_too[qwen3_moe_mixed_yarn-cuts0]",
    "tests/pallas_kernels/test_grouped_gemm_quantized.py::test_kernel_equals_float64",
    "tests/benchmarks/test_roofline.py::test_launches_are_those_of_compiled_programs",
    "tests/benchmarks/test_roofline.py::test_the_command_starts_no_device",
    "tests/training/test_family.py::test_tuning_learns_and_leaves_what_it_is_given",
    "tests/training/test_lookahead.py::test_probes_guess_better_than_the_next_router",
    "tests/jmoe/test_parts.py::test_a_program_for_each_part_is_the_whole_too[qwen2_moe-cuts0]",
    "tests/jmoe/test_parts.py::test_a_program_for_each_part_is_the_whole_too[qwen2_moe-cuts1]",
    "tests/jmoe/test_parts.py::"
    "test_a_program_for_each_part_is_the_whole_too[qwen3_moe_mixed_yarn-cuts1]",
    "tests/serving/execution/test_programs.py::"
    "test_a_program_for_each_part_where_the_host_would_wait_for_a_loop[zero]",
    "tests/serving/execution/test_programs.py::"
    "test_a_program_for_each_part_where_the_host_would_wait_for_a_loop[full]",
    "tests/serving/execution/test_programs.py::"
    "test_layers_one_after_another_answer_as_scanned_ones",
    "tests/jmoe/test_cut.py::test_two_parts_are_the_whole_wherever_it_is_cut[qwen2_moe-True]",
    "tests/jmoe/test_generate.py::"
    "test_layers_in_arrays_of_their_own_are_the_same_model[qwen3_moe_mixed_yarn]",
    "tests/benchmarks/test_simulator.py::"
    "test_a_steady_load_that_needs_no_brownout_gets_none[300.0]",
    "tests/benchmarks/test_host_path.py::test_a_slow_device_is_kept_busy",
    "tests/benchmarks/test_aep_simulator.py::test_compiled_loops_are_the_plain_ones",
    "tests/pallas_kernels/test_grouped_gemm_quantized.py::test_reference_equals_float64",
    "tests/serving/execution/test_programs.py::"
    "test_parts_of_a_gpu_are_alike_for_all_sizes_of_a_phase",
    "tests/training/test_train.py::test_resumed_run_equals_uninterrupted",
    "tests/jmoe/parallel/test_mesh_steps.py::test_all_other_steps_over_a_mesh_are_those_of_one_device",
    "tests/benchmarks/test_balance.py::test_a_tiny_run_writes_table_json_and_picture",
    "tests/serving/bench/test_balance_bench.py::test_the_whole_bench_on_the_bundled_model",
    "tests/serving/bench/test_priority.py::test_the_whole_bench_on_the_bundled_model",
    "tests/serving/test_preemption.py::test_many_more",
    "tests/serving/test_preemption.py::test_answers_do_not_depend_on_what_went_between[ls_first]",
    "tests/serving/test_family_served.py::test_answers_are_those_of_each_model_alone[0]",
    "tests/jmoe/parallel/test_mesh_steps.py::test_some_steps_over_a_mesh_are_those_of_one_device",
    "tests/jmoe/test_cut.py::test_two_parts_are_the_whole_wherever_it_is_cut[qwen2_moe-False]",
    "tests/jmoe/test_cut.py::"
    "test_two_parts_are_the_whole_wherever_it_is_cut[qwen3_moe_mixed_yarn-True]",
    "tests/training/test_train.py::test_loss_falls",
    *(
        "tests/training/test_consolidate.py::"
        f"test_costs_are_what_a_model_with_one_expert_swapped_differs_by[{case}]"
        for case in ("1-2-0", "2-0-1", "0-2-1")
    ),
    *(
        f"tests/jmoe/test_mixed.py::test_rows_are_those_of_each_model_alone[{case}]"
        for case in ("unshared", "shared", "attention_bias", "dense_layers")
    ),
    "tests/jmoe/test_mixed.py::test_layers_in_arrays_of_their_own_are_the_same_step",
    "tests/serving/bench/test_demo.py::test_repeats_store_medians",
    "tests/pallas_kernels/test_grouped_gemm_quantized.py::"
    "test_slots_that_nobody_visits_are_not_read",
    "tests/serving/test_preemption.py::test_what_gave_way_answers_alike",
    "tests/serving/test_preemption.py::test_layers_at_once_are_measured_and_within_the_model",
    "tests/serving/test_preemption.py::"
    "test_answers_do_not_depend_on_what_went_between[restless:Restless]",
    "tests/jmoe/test_generate.py::test_layers_in_arrays_of_their_own_write_the_same",
    "tests/pallas_kernels/test_grouped_gemm_quantized.py::test_compiles_for_an_h200_without_spills",
    "tests/serving/scheduling/test_priorities.py::test_thousands_of_random_traces_lose_nothing",
    "tests/serving/execution/test_executables.py::"
    "test_a_patched_run_leaves_nothing_that_an_unpatched_one_finds",
    "tests/training/test_distill.py::test_the_end_to_end_stage_is_the_same_on_two_devices",
    "tests/e2e/test_hostile_load.py::test_served_tokens_are_those_of_the_notebook[one]",
    "tests/serving/test_family_served.py::test_over_a_socket_with_shared_experts",
    "tests/serving/test_mixed_served.py::test_every_model_writes_what_it_writes_alone",
    "tests/serving/execution/test_executables.py::"
    "test_a_warm_start_lowers_nothing_and_answers_alike",
    "tests/serving/test_host_experts_served.py::"
    "test_who_refuses_brownout_gets_its_models_experts[changes0]",
    "tests/serving/execution/test_aep_workers.py::"
    "test_tokens_are_the_whole_models_in_any_order[qwen2_moe-1-2-3]",
    "tests/serving/frontend/test_byte_fallback.py::test_no_text_of_a_model_ends_the_engine",
    "tests/serving/test_shaped.py::test_tokens_are_those_of_changed_logits[room]",
    "tests/serving/test_family_served.py::test_under_brownout_each_has_its_own_united_experts",
    "tests/benchmarks/test_host_path_http.py::test_both_are_measured",
    "tests/jmoe/test_cut.py::test_half_layers_one_by_one_are_the_whole[qwen3_moe_mixed_yarn]",
    "tests/serving/test_prefix_served.py::test_answers_are_those_of_prompts_computed_whole",
    "tests/training/test_train.py::test_logits_equal_jmoes",
    "tests/jmoe/test_shaping.py::test_rows_that_are_not_shaped_get_what_they_would_get_alone",
    "tests/serving/execution/test_replay.py::test_the_same_calls_end_in_the_same_state",
    "tests/jmoe/test_outside_architecture.py::test_with_it_the_model_is_the_one_it_renames",
    "tests/benchmarks/test_balance.py::test_every_strategy_on_the_same_traces",
    "tests/e2e/test_hostile_load.py::test_overload_is_refused_with_a_time_to_come_back",
    "tests/benchmarks/test_simulator.py::"
    "test_prediction_keeps_more_tokens_in_time_with_fewer_degraded_visits",
    "tests/serving/test_host_experts_served.py::"
    "test_who_refuses_brownout_gets_its_models_experts[changes2]",
    "tests/pallas_kernels/test_routing.py::test_route_is_its_parts[mosaic-zero-softmax-20_1]",
    "tests/jmoe/test_hub.py::test_the_command_line_takes_a_name",
    "tests/training/test_consolidate.py::"
    "test_costs_are_what_a_model_with_one_expert_swapped_differs_by[0-1-0]",
    "tests/jmoe/test_away.py::test_a_stand_in_is_the_siblings_expert_and_a_fetched_one_its_own",
    "tests/serving/execution/test_pages_by_memory.py::test_a_runner_takes_what_its_programs_leave",
    "tests/benchmarks/test_fuzz_http.py::test_two_thousand_requests_are_answered",
    "tests/jmoe/test_parts.py::test_parts_are_the_whole_wherever_it_is_cut[qwen2_moe]",
    "tests/serving/bench/test_demo.py::test_each_controller_is_played_on_one_calibration",
    "tests/jmoe/test_parts.py::test_parts_are_the_whole_wherever_it_is_cut[qwen3_moe_mixed_yarn]",
    "tests/serving/execution/test_aep_schedules.py::"
    "test_what_a_worker_that_ends_takes_with_it_is_computed_once_more",
    "tests/jmoe/test_generate.py::test_tokens_and_degraded_visits_equal_loops[zero100]",
    "tests/jmoe/test_shaping.py::test_greedy_rows_take_the_likeliest_of_what_a_loop_leaves",
    "tests/jmoe/test_mixed.py::test_rows_are_those_of_each_model_alone[three]",
    "tests/jmoe/test_random_model.py::test_a_seed_gives_the_same_model_and_another_another",
    "tests/jmoe/test_parts.py::test_the_program_for_parts_is_the_one_without[qwen3_moe_mixed_yarn]",
    "tests/jmoe/test_generate.py::test_batched_equals_one_at_a_time",
    "tests/training/test_older_run.py::test_its_finished_layer_is_taken_over",
    "tests/jmoe/test_residuals.py::"
    "test_models_are_their_siblings_experts_and_their_own_differences",
    "tests/training/test_distill.py::test_brownout_errors_are_sums_over_degraded_visits[combined]",
    "tests/jmoe/test_checkpoint.py::test_save_and_load_give_equal_logits",
    "tests/jmoe/test_generate.py::test_layers_in_arrays_of_their_own_are_the_same_model[qwen2_moe]",
    "tests/training/test_distill.py::test_nan_is_an_error_that_says_where",
    "tests/jmoe/test_random_model.py::"
    "test_united_experts_are_means_of_their_members_and_can_be_loaded",
    "tests/serving/bench/test_workload.py::test_models_are_drawn_by_weight_and_seed",
    "tests/jmoe/test_mixed.py::test_brownout_is_one_plan_over_distinct_experts[0.0-some-told0]",
    "tests/training/test_lookahead.py::test_rows_beyond_the_number_asked_for_do_not_count",
    "tests/jmoe/test_generate.py::"
    "test_sampling_is_reproducible_and_prompt_i_draws_from_seed_plus_i",
    "tests/jmoe/parallel/test_asynchronous.py::"
    "test_figures_are_those_of_the_forecast_and_of_the_simulator",
}
ON_MESHES = "tests/e2e/test_hostile_load.py"
SHORT_ON_A_MESH = "test_served_tokens_are_those_of_the_notebook[ep=2]"
"""What a served mesh answers; the other end-to-end tests on meshes are deep."""

EMULATED, INTERPRETED = "sm90", "mosaic"
"""Parameters by which contract suites name the implementation they run."""

INTERPRETED_TESTS = 1
"""Of a contract suite, not deep; each on its first shape."""

GENERATES = "tests/jmoe/test_golden.py::test_paged_generation_equals_transformers_greedy"
GENERATING = {"qwen2_moe", "mixtral", "qwen3_moe_attention_bias", "qwen3_moe_mixed_yarn"}


class Sizes:
    """Decides test by test, in the order in which they are collected."""

    def __init__(self) -> None:
        self._interpreted: dict[str, set[str]] = {}

    def is_deep(self, nodeid: str) -> bool:
        """`nodeid` is pytest's: file, function, and parameters in brackets."""
        file, _, test = nodeid.partition("::")
        if file in DEEP_FILES or file.startswith(DEEP_FOLDERS) or nodeid in DEEP_TESTS:
            return True
        function, _, parameters = test.partition("[")
        if f"{file}::{function}" == GENERATES:
            return parameters.rstrip("]") not in GENERATING
        if EMULATED in parameters or (file == ON_MESHES and "ep=" in parameters):
            return test != SHORT_ON_A_MESH
        if INTERPRETED in parameters:
            seen = self._interpreted.setdefault(file, set())
            if function in seen or len(seen) == INTERPRETED_TESTS:
                return True
            seen.add(function)
        return False
