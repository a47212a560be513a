"""Which tests are deep: `make test` leaves them out, `make test-deep` runs them alone.

Deep is what takes minutes and a change to serving, model, training or an op's contract seldom
breaks: kernels emulated instruction by instruction, interpreted over many shapes, or compiled for
an H200; whole steps at full depth; programs that measure on a GPU, run dry; long end-to-end runs.
Of an op's contract suite, `make test` interprets the kernel in the first tests alone. Every golden
model is held to its logits there, one a family and the mixed one to what they generate, too.
"""

DEEP_FILES = {
    "tests/e2e/test_asynchronous_faults.py",
    "tests/e2e/test_asynchronous_ray.py",
    "tests/e2e/test_family_hostile.py",
    "tests/e2e/test_hostile_script.py",
    "tests/e2e/test_hosts.py",
    "tests/e2e/test_readme.py",
    "tests/e2e/test_stopped_process.py",
    "tests/jmoe/test_compile_h200.py",
    "tests/jmoe/test_compile_mixed_h200.py",
    "tests/jmoe/test_kernels_emulated.py",
    "tests/jmoe/test_pages.py",
    "tests/jmoe/parallel/test_compile_eight_h200.py",
    "tests/pallas_kernels/test_grouped_gemm_mosaic.py",
    "tests/pallas_kernels/test_kv_write_mosaic.py",
    "tests/pallas_kernels/test_paged_attention_mosaic.py",
    "tests/pallas_kernels/test_planning_mosaic.py",
    "tests/pallas_kernels/test_prefill_attention_mosaic.py",
    "tests/pallas_kernels/test_routing_mosaic.py",
    "tests/pallas_kernels/test_past_2_31.py",
    "tests/serving/execution/test_aep_port_processes.py",
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
    "tests/serving/test_preemption.py::test_a_hundred_traces",
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
}
ON_MESHES = "tests/e2e/test_hostile_load.py"
SHORT_ON_A_MESH = "test_served_tokens_are_those_of_the_notebook[ep=4]"
"""What a served mesh answers; the other end-to-end tests on meshes are deep."""

EMULATED, INTERPRETED = "sm90", "mosaic"
"""Parameters by which contract suites name the implementation they run."""

INTERPRETED_TESTS = 2
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
