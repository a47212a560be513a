"""Which tests are deep: `make test` leaves them out, `make test-deep` runs them alone.

Deep is what takes minutes and a change to serving, model, training or an op's contract seldom
breaks: kernels emulated instruction by instruction, interpreted over many shapes, or compiled for
an H200; whole steps at full depth; programs that measure on a GPU, run dry; long end-to-end runs.
Of an op's contract suite, `make test` interprets the kernel in the first tests alone. Every golden
model is held to its logits there, one of them to what it generates, too.

Exhaustive (`make test-exhaustive`) are further models, shapes and cases of deep tests, and the
longest runs: for whoever changes a kernel, a step program or a benchmark, and before a release.
"""

from collections import Counter
from pathlib import Path

GOLDEN = {path.name for path in (Path(__file__).parent / "golden").iterdir() if path.is_dir()}

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
    "tests/jmoe/test_compile_other_gpus.py",
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
    "tests/serving/test_engine_emulated.py",
    "tests/serving/frontend/test_openai_agent.py",
    "tests/benchmarks/test_family_qos_run.py",
    "tests/benchmarks/test_gpu_benchmark_dry.py",
    "tests/benchmarks/test_gpu_light.py",
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
    "tests/benchmarks/test_aep_simulator.py::test_overheads_by_hand",
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
    "tests/serving/test_asynchronous_served.py::test_what_has_no_effect_is_refused_and_not_shown",
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
    "tests/training/test_family.py::test_united_experts_learn_to_stand_in_for_a_variants",
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
    "tests/pallas_kernels/test_grouped_gemm_quantized.py::"
    "test_slots_that_nobody_visits_are_not_read",
    "tests/serving/test_preemption.py::test_what_gave_way_answers_alike",
    "tests/serving/test_preemption.py::test_layers_at_once_are_measured_and_within_the_model",
    "tests/serving/test_preemption.py::"
    "test_answers_do_not_depend_on_what_went_between[restless:Restless]",
    "tests/jmoe/test_generate.py::test_layers_in_arrays_of_their_own_write_the_same",
    "tests/pallas_kernels/test_grouped_gemm_quantized.py::test_compiles_for_an_h200_without_spills",
    "tests/serving/scheduling/test_priorities.py::test_many_more_random_traces_lose_nothing",
    "tests/serving/execution/test_executables.py::"
    "test_a_patched_run_leaves_nothing_that_an_unpatched_one_finds",
    "tests/training/test_distill.py::test_the_end_to_end_stage_is_the_same_on_two_devices",
    "tests/e2e/test_hostile_load.py::test_served_tokens_are_those_of_the_notebook[one]",
    "tests/serving/test_family_served.py::test_over_a_socket_with_shared_experts_under_brownout",
    "tests/serving/test_mixed_served.py::test_every_model_writes_what_it_writes_alone",
    "tests/serving/execution/test_executables.py::"
    "test_a_warm_start_lowers_nothing_and_answers_alike",
    "tests/serving/test_host_experts_served.py::"
    "test_who_refuses_brownout_gets_its_models_experts[changes0]",
    "tests/serving/execution/test_aep_workers.py::"
    "test_tokens_are_the_whole_models_in_any_order[qwen2_moe-1-2-3]",
    "tests/serving/frontend/test_byte_fallback.py::test_no_text_of_a_model_ends_the_engine",
    "tests/serving/test_shaped.py::test_structured_outputs_match_and_leave_others_as_they_are",
    "tests/serving/test_mixed_served.py::test_sets_that_come_and_go",
    "tests/serving/test_host_experts_served.py::test_what_is_asked_most_is_fetched_ahead",
    "tests/serving/cli/test_cli.py::test_generate_in_process",
    "tests/jmoe/test_cut.py::test_an_attention_kind_of_ones_own[qwen2_moe]",
    "tests/jmoe/test_parts.py::"
    "test_exempt_rows_have_the_same_bits_in_any_company[qwen3_moe_mixed_yarn]",
    "tests/training/test_distill.py::test_training_beats_its_start[combined]",
    "tests/training/test_distill.py::test_layers_in_turn_are_the_model",
    "tests/training/test_consolidate.py::test_an_expert_that_no_row_visits_costs_nothing",
    "tests/jmoe/test_cut.py::"
    "test_the_fused_stage_has_the_bits_of_the_stages_it_is_made_of[qwen3_moe_mixed_yarn]",
    "tests/jmoe/test_cut.py::test_an_attention_kind_of_ones_own[qwen3_moe_mixed_yarn]",
    "tests/jmoe/test_parts.py::"
    "test_a_parked_step_goes_on_after_another_and_they_may_join[qwen3_moe_mixed_yarn]",
    "tests/jmoe/test_hub.py::test_a_model_is_fetched_as_far_as_it_is_read",
    "tests/jmoe/parallel/test_asynchronous.py::test_the_advice_is_no_in_every_simulated_case",
    "tests/jmoe/parallel/test_asynchronous.py::test_more_host_cost_never_makes_it_pay_more",
    "tests/jmoe/test_mixed.py::test_brownout_is_one_plan_over_distinct_experts[0.0-some-told1]",
    "tests/jmoe/test_mixed.py::test_pages_that_rows_were_given_are_written",
    "tests/serving/test_shaped.py::test_tokens_are_those_of_changed_logits[room]",
    "tests/serving/test_family_served.py::test_under_brownout_each_has_its_own_united_experts",
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

EMULATED, INTERPRETED, BATCHED = "sm90", "mosaic", "batched"
"""Parameters by which contract suites name the implementation they run."""

INTERPRETED_TESTS = 1
"""Of a contract suite, not deep; each on its first shape."""
NEVER_INTERPRETED = "tests/pallas_kernels/test_routing.py"
"""Not in `make test`: its smallest case takes twenty seconds."""

ONE_OF_EACH_FAMILY = {
    "tests/jmoe/test_config_changes.py": {"qwen2_moe", "mixtral", "qwen3_moe_mixed_yarn"},
    "tests/jmoe/test_stats.py": {"qwen2_moe", "qwen3_moe"},
    "tests/jmoe/test_united.py": {"qwen2_moe", "qwen3_moe"},
}
"""Of tests that take golden models in turn, which models' are not deep."""

THINNED = {
    "tests/pallas_kernels/": 1000,  # the first case alone
    "tests/pallas_kernels/test_odd_shapes.py": 3,
}
"""Of each test of these files and each implementation, which cases are not exhaustive: every n-th.
The longest name that fits decides."""
THINNED_LONGEST = sorted(THINNED, key=len, reverse=True)

INTERPRETED_DEEP = 2
"""Of a contract suite, deep tests whose kernel is interpreted and that are not exhaustive. Every
test's kernel is emulated."""

EXHAUSTIVE_FILES = {
    "tests/benchmarks/test_family_qos_run.py",
    "tests/benchmarks/test_kernel_benchmark_run.py",
    "tests/e2e/test_family_hostile.py",
    "tests/serving/bench/test_balance_bench.py",
    "tests/serving/test_engine_emulated.py",
    "tests/jmoe/test_kernels_emulated.py",
    "tests/training/test_distill_measured.py",
    "tests/training/test_distill_page.py",
    "tests/training/test_family_quality.py",
}
EXHAUSTIVE = {
    "tests/benchmarks/test_gpu_benchmark_dry.py::test_a_layer_is_distilled",
    "tests/benchmarks/test_gpu_benchmark_dry.py::"
    "test_the_engines_choice_between_them_is_by_its_own_times",
    "tests/benchmarks/test_gpu_benchmark_dry.py::test_layers_are_compared_row_by_row",
    "tests/e2e/test_hostile_load.py::test_served_tokens_are_those_of_the_notebook[one]",
    "tests/e2e/test_hostile_load.py::test_everyone_is_answered_and_nothing_leaks[ep=8]",
    "tests/e2e/test_hostile_load.py::test_a_way_can_be_switched_under_load[ep=8]",
    "tests/e2e/test_hostile_load.py::test_served_tokens_are_those_of_the_notebook[ep=8]",
    "tests/e2e/test_asynchronous_faults.py::test_workers_are_killed_and_come_back[1]",
    "tests/e2e/test_hostile_load.py::test_everyone_is_answered_and_nothing_leaks[aep=2+6]",
    "tests/e2e/test_hostile_script.py::test_a_server_withstands_a_small_run",
    "tests/e2e/test_hosts.py::test_a_follower_that_falls_silent_is_noticed_within_the_time",
    "tests/e2e/test_hosts.py::test_a_killed_follower_ends_all_and_says_so_and_a_restart_works",
    "tests/jmoe/test_compile_mixed_h200.py::"
    "test_a_mixed_step_copies_neither_experts_nor_pages[qwen3-30b-a3b]",
    *(
        f"tests/jmoe/parallel/test_compile_eight_h200.py::TestCopiesOfExperts::{test}"
        for test in (
            "test_only_what_is_sent_is_written",
            "test_rows_travel_under_visits_of_own_rows",
            "test_both_arrays_travel_under_visits_of_other_rows",
            "test_only_the_sum_waits",
            "test_launches",
        )
    ),
    "tests/jmoe/parallel/test_compile_eight_h200.py::"
    "test_a_step_copies_nothing_and_exchanges_rows_once_each_way[prefill-177]",
    "tests/jmoe/parallel/test_compile_eight_h200.py::"
    "test_the_control_that_joins_copies_and_pool_is_caught[True]",
    "tests/jmoe/parallel/test_mesh_steps.py::"
    "test_all_other_steps_over_a_mesh_are_those_of_one_device",
    *(
        f"tests/jmoe/test_compile_h200.py::{test}"
        for test in (
            "test_a_prefill_step_is_one_graph_and_copies_neither_experts_nor_pages"
            "[qwen1.5-moe-a2.7b]",
            "test_a_prefill_step_is_one_graph_and_copies_neither_experts_nor_pages[qwen3-30b-a3b]",
            "test_a_decode_step_is_one_graph_and_copies_neither_experts_nor_pages[qwen3-30b-a3b]",
            "test_a_decode_step_is_one_graph_and_copies_neither_experts_nor_pages[mixtral-8x7b]",
            "test_a_part_of_a_step_is_one_graph_with_few_launches_of_its_own[prefill-14]",
            "test_an_eager_step_scans_its_layers_and_copies_nothing[mixtral-8x7b]",
            "test_an_eager_step_scans_its_layers_and_copies_nothing[qwen3-30b-a3b]",
            "test_the_control_that_slices_its_layer_from_the_pool_is_caught[True]",
            "test_the_first_and_the_last_part_copy_nothing_either[layers1]",
            "test_a_padded_router_changes_no_bit",
        )
    ),
    *(
        f"tests/jmoe/test_golden.py::test_paged_generation_equals_transformers_greedy[{case}]"
        for case in (
            "qwen2_moe_mlp_only_tied",
            "mixtral_top1_head_dim",
            "qwen2_moe_yarn",
            "qwen3_moe",
            "mixtral_tied_llama3",
            "qwen3_moe_tied_no_head_dim",
        )
    ),
    "tests/jmoe/test_parts.py::test_a_program_for_each_part_is_the_whole_too[qwen2_moe-cuts0]",
    *(
        "tests/jmoe/test_parts.py::"
        f"test_a_program_for_each_part_is_the_whole_too[qwen3_moe_mixed_yarn-{cuts}]"
        for cuts in ("cuts0", "cuts1")
    ),
    "tests/jmoe/test_parts.py::test_parts_are_the_whole_wherever_it_is_cut[qwen3_moe_mixed_yarn]",
    "tests/jmoe/test_parts.py::test_the_program_for_parts_is_the_one_without[qwen3_moe_mixed_yarn]",
    "tests/jmoe/test_cut.py::test_two_parts_are_the_whole_wherever_it_is_cut[qwen2_moe-True]",
    "tests/jmoe/test_cut.py::"
    "test_two_parts_are_the_whole_wherever_it_is_cut[qwen3_moe_mixed_yarn-True]",
    *(
        f"tests/jmoe/test_mixed.py::test_rows_are_those_of_each_model_alone[{case}]"
        for case in ("unshared", "attention_bias", "dense_layers", "padding")
    ),
    "tests/jmoe/test_mixed.py::test_layers_in_arrays_of_their_own_are_the_same_step",
    "tests/jmoe/test_generate.py::test_layers_in_arrays_of_their_own_write_the_same",
    "tests/jmoe/test_generate.py::"
    "test_layers_in_arrays_of_their_own_are_the_same_model[qwen3_moe_mixed_yarn]",
    *(
        f"tests/pallas_kernels/test_routing_mosaic.py::{test}"
        for test in ("test_steps_of_several_blocks", "test_more_than_64_experts")
    ),
    "tests/pallas_kernels/test_planning_mosaic.py::test_emulated[3-70-seeds1]",
    "tests/pallas_kernels/test_grouped_gemm_mosaic.py::test_weights_of_an_expert_are_read_once",
    "tests/serving/bench/test_priority.py::test_the_whole_bench_on_the_bundled_model",
    "tests/serving/execution/test_programs.py::"
    "test_parts_of_a_gpu_are_alike_for_all_sizes_of_a_phase",
    "tests/serving/execution/test_programs.py::"
    "test_a_program_for_each_part_where_the_host_would_wait_for_a_loop[full]",
    *(
        "tests/serving/execution/test_aep_workers.py::"
        f"test_tokens_are_the_whole_models_in_any_order[{case}]"
        for case in ("qwen2_moe-2-3-16", "mixtral-1-1-16", "qwen3_moe_mixed_yarn-2-2-16")
    ),
    "tests/serving/execution/test_aep_workers.py::"
    "test_brownout_to_nothing_and_rows_that_refuse_it[True]",
    "tests/serving/execution/test_aep_workers.py::test_workers_on_devices_of_their_own",
    "tests/serving/test_host_experts_served.py::"
    "test_who_refuses_brownout_gets_its_models_experts[changes0]",
    "tests/serving/test_preemption.py::test_answers_do_not_depend_on_what_went_between[ls_first]",
    "tests/training/test_accuracy_benchmark.py::test_the_ablation_runs_once_and_is_read_again",
    "tests/training/test_distill_h200.py::"
    "test_the_end_to_end_stage_fits[qwen1.5-moe-a2.7b-2-1-130]",
    *(
        "tests/training/test_distill_h200.py::"
        f"test_a_layer_fits_one_gpu_many_times_over[qwen1.5-moe-a2.7b-{case}]"
        for case in ("2-8", "8-5")
    ),
    "tests/serving/test_shaped.py::test_shaped_rows_over_a_mesh",
    "tests/training/test_distill.py::test_the_end_to_end_stage_is_the_same_on_two_devices",
    "tests/training/test_distill_runs.py::"
    "test_finished_layers_serve_other_ways_and_another_end_to_end_stage",
    "tests/training/test_distill_runs.py::test_interrupted_at_ten_moments_it_ends_in_the_same_bits",
}

GENERATES = "tests/jmoe/test_golden.py::test_paged_generation_equals_transformers_greedy"
GENERATING = {"qwen2_moe"}


class Sizes:
    """Decides test by test, in the order in which they are collected."""

    def __init__(self) -> None:
        self._interpreted: dict[str, set[str]] = {}
        self._batched: set[str] = set()
        self._num_cases: Counter[tuple[str, str]] = Counter()

    def markers(self, nodeid: str) -> list[str]:
        """None: `make test` runs it. `nodeid` is pytest's: file, function, cases in brackets."""
        if not self._is_deep(nodeid):
            return []
        return ["deep", "exhaustive"] if self._is_exhaustive(nodeid) else ["deep"]

    def _is_deep(self, nodeid: str) -> bool:
        file, _, test = nodeid.partition("::")
        if file in DEEP_FILES or file.startswith(DEEP_FOLDERS) or nodeid in DEEP_TESTS:
            return True
        function, _, parameters = test.partition("[")
        if f"{file}::{function}" == GENERATES:
            return parameters.rstrip("]") not in GENERATING
        models = [name for name in parameters.rstrip("]").split("-") if name in GOLDEN]
        if models and models[0] not in ONE_OF_EACH_FAMILY.get(file, GOLDEN):
            return True
        if EMULATED in parameters or (file == ON_MESHES and "ep=" in parameters):
            return True
        if file == NEVER_INTERPRETED and BATCHED in parameters:
            first = function not in self._batched
            self._batched.add(function)
            return not first
        if INTERPRETED not in parameters:
            return False
        return file == NEVER_INTERPRETED or self._is_past(INTERPRETED_TESTS, file, function)

    def _is_exhaustive(self, nodeid: str) -> bool:
        file, _, test = nodeid.partition("::")
        if file in EXHAUSTIVE_FILES or nodeid in EXHAUSTIVE:
            return True
        function, _, parameters = test.partition("[")
        step = next((THINNED[start] for start in THINNED_LONGEST if file.startswith(start)), 1)
        how = next((one for one in (EMULATED, INTERPRETED) if one in parameters), "")
        self._num_cases[nodeid.partition("[")[0], how] += 1
        if (self._num_cases[nodeid.partition("[")[0], how] - 1) % step:
            return True
        return how == INTERPRETED and self._is_past(INTERPRETED_DEEP, file, function)

    def _is_past(self, most: int, file: str, function: str) -> bool:
        """Whether a file has `most` other tests with an interpreted kernel, or this one before."""
        seen = self._interpreted.setdefault(f"{most} of {file}", set())
        if function in seen or len(seen) == most:
            return True
        seen.add(function)
        return False
