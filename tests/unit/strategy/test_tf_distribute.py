"""What tf.distribute promises, sentence by sentence, and for each the test that shows it, or what will."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

REPLICAS = "test_replicas"
STRATEGY = "test_strategy"
STRATEGIES = "test_strategies"
CENTRAL = "test_central_storage"
COORDINATOR = "test_coordinator"
GRADIENTS = "test_gradients"
GUIDES = "test_guides"
INPUTS = "test_inputs"
LOSSES = "test_losses"
OVERLAP = "test_overlap"
PACKED = "test_packed_reduce"
PLACEMENT = "test_placement"
SERVERS = "test_parameter_servers"
TPU = "test_tpu"
VARIABLES = "test_variables"
DATASETS_ALONE = "test_dataset"
INPUTS_ALONE = "test_distributed"

#: (what is promised, tests that show it | "open: what is missing").
ROWS = [
    # -- strategies --------------------------------------------------------------------------------------------------
    (
        "MirroredStrategy(devices, cross_device_ops): synchronous, one replica per device of one machine",
        f"{OVERLAP}::test_mirrored_strategy_is_for_one_machine",
        f"{OVERLAP}::test_cross_device_ops",
        f"{GUIDES}::test_the_custom_training_loop",
    ),
    (
        "MirroredStrategy(devices): what is made in scope and run is on the replica's device",
        f"{PLACEMENT}::test_what_is_made_and_run_is_on_the_devices_given",
        f"{PLACEMENT}::test_values_and_threads_of_replicas_are_there_too",
        f"{PLACEMENT}::test_batches_are_moved_to_the_devices_given",
    ),
    (
        "MultiWorkerMirroredStrategy(cluster_resolver, communication_options): synchronous over workers",
        f"{STRATEGY}::test_one_replica_per_rank",
        f"{GUIDES}::test_lines_of_the_guides",
        "test_equal_to_one_rank::test_n_ranks_train_as_one",
    ),
    (
        "ParameterServerStrategy(cluster_resolver, variable_partitioner): asynchronous, a coordinator",
        f"{COORDINATOR}::test_the_guides_custom_loop_runs",
        f"{COORDINATOR}::test_every_push_is_applied_once_and_seen_after_join",
    ),
    (
        "ParameterServerStrategy of TensorFlow 1: every worker loops",
        f"{SERVERS}::test_workers_learn_digits_together",
        f"{SERVERS}::test_one_worker_alone_is_plain_training",
    ),
    (
        "CentralStorageStrategy: variables once on the host, computation on every replica",
        f"{CENTRAL}::test_weights_are_those_of_mirrored_replicas",
        f"{CENTRAL}::test_all_ranks_see_the_same_memory",
        f"{CENTRAL}::test_an_update_is_made_once",
    ),
    (
        "CentralStorageStrategy with one device: everything is on it",
        f"{PLACEMENT}::test_what_is_made_and_run_is_on_the_devices_given",
        f"{CENTRAL}::test_devices_are_those_of_the_ranks",
    ),
    (
        "OneDeviceStrategy(device): what is made is placed there",
        f"{STRATEGIES}::test_one_device_places_modules_and_what_run_makes",
    ),
    (
        "OneDeviceStrategy(device): inputs are fetched ahead to it",
        f"{STRATEGIES}::test_inputs_are_moved",
        "test_iterator::test_batches_are_moved_and_the_cursor_counts_those_yielded",
    ),
    (
        "the default strategy: one object that passes through, without scope, and reduces",
        f"{STRATEGIES}::test_only_the_pass_through_strategy_is_none",
        f"{STRATEGIES}::test_the_replica_outside_all_strategies_reduces_with_itself",
        f"{STRATEGY}::test_default_strategy_reduces_locally",
    ),
    (
        "TPUStrategy: resolver, connect, initialize, strategy",
        f"{TPU}::test_there_is_nothing_to_connect_to",
        f"{TPU}::test_without_torch_xla",
        f"{TPU}::test_models_train_on_xla_devices",
    ),
    (
        "scope, run, reduce and gather are there",
        f"{STRATEGY}::test_current_strategy",
        f"{STRATEGY}::test_run_gives_the_result_of_the_local_replica",
        f"{STRATEGY}::test_sum_over_replicas",
        f"{REPLICAS}::test_gather_joins_in_the_order_of_replicas",
    ),
    (
        "experimental_local_results: this process's replicas; num_replicas_in_sync: of the job",
        f"{REPLICAS}::test_run_gives_each_replica_its_own_and_returns_all",
    ),
    (
        "experimental_make_numpy_dataset: arrays held once, then distributed",
        f"{STRATEGY}::test_a_numpy_dataset_is_held_once_and_distributed",
        f"{INPUTS_ALONE}::test_numpy_datasets",
    ),
    # -- input, in short ---------------------------------------------------------------------------------------------
    (
        "experimental_distribute_dataset takes the global batch and divides it",
        f"{STRATEGY}::test_parts_of_a_distributed_dataset",
        f"{DATASETS_ALONE}::test_parts_join_to_the_global_batch",
    ),
    (
        "a distributed dataset reads ahead, as far as the dataset asks for it",
        "test_sources::test_prefetch_reads_ahead_and_the_cursor_counts_what_was_handed_out",
    ),
    (
        "iterators: iter, next, get_next, get_next_as_optional().has_value()",
        f"{INPUTS_ALONE}::test_iterators",
    ),
    ("iterators and distributed datasets have an element_spec", f"{INPUTS_ALONE}::test_element_spec"),
    # -- contexts and scope ------------------------------------------------------------------------------------------
    (
        "a thread begins in the only replica of the default strategy",
        f"{STRATEGIES}::test_a_thread_begins_outside_all_strategies",
        f"{REPLICAS}::test_replica_context",
    ),
    ("scope() is cross-replica context, where get_replica_context() is None", f"{REPLICAS}::test_replica_context"),
    ("run puts the function in replica context", f"{REPLICAS}::test_replica_context"),
    ("merge_call leads back to cross-replica context, strategy first", f"{REPLICAS}::test_merge_call"),
    ("extended.update is a third context", f"{STRATEGIES}::test_update_is_a_third_context"),
    (
        "calls in the wrong context raise RuntimeError and say which one is right",
        f"{STRATEGIES}::test_what_belongs_in_cross_replica_context_says_so",
        f"{STRATEGIES}::test_the_replica_outside_all_strategies_reduces_with_itself",
        f"{STRATEGY}::test_reduce_belongs_outside_run",
    ),
    ("a variable of another strategy: RuntimeError of mixing", f"{VARIABLES}::test_strategies_are_not_mixed"),
    (
        "another strategy inside a scope: RuntimeError of mixing",
        f"{STRATEGIES}::test_a_strategy_may_be_set_for_all_code",
        f"{STRATEGY}::test_current_strategy",
    ),
    ("a scope may be entered again in itself", f"{STRATEGIES}::test_a_scope_may_be_entered_again_in_itself"),
    (
        "experimental_set_strategy: a strategy for all code; None: none",
        f"{STRATEGIES}::test_a_strategy_may_be_set_for_all_code",
        f"{STRATEGIES}::test_another_strategy_replaces_the_one_set",
    ),
    (
        "experimental_set_strategy is refused inside a scope and run",
        f"{STRATEGIES}::test_a_strategy_may_be_set_for_all_code",
        f"{STRATEGIES}::test_a_strategy_is_not_set_inside_run",
    ),
    (
        "has_strategy() is False under the default strategy only",
        f"{STRATEGIES}::test_only_the_pass_through_strategy_is_none",
    ),
    (
        "variables and models remember the strategy they were made in",
        f"{STRATEGIES}::test_variables_know_their_strategy",
        f"{VARIABLES}::test_strategies_are_not_mixed",
        f"{GRADIENTS}::test_a_model_keeps_summing_when_its_strategy_is_out_of_sight",
    ),
    (
        "fit, evaluate and predict enter the model's strategy by themselves",
        "test_fit::test_the_history_is_that_of_a_loop_by_hand",
        "test_fit::test_each_row_is_evaluated_once_and_predictions_are_in_order",
    ),
    (
        "save works outside the scope",
        "test_metrics::test_it_comes_back_from_a_checkpoint",
        "test_checkpoint::test_a_restart_resumes_bit_for_bit",
    ),
    (
        "a plain model(x) does not enter the strategy",
        f"{STRATEGIES}::test_a_plain_call_of_a_model_does_not_enter_its_strategy",
    ),
    (
        "merge_call waits for all local replicas, hands over their arguments, and gives each its part",
        f"{REPLICAS}::test_merge_call",
        "test_scheduler::test_merge_gives_each_its_part",
    ),
    (
        "merge points must be reached by all replicas in the same order",
        f"{REPLICAS}::test_replicas_that_do_not_agree_are_named",
        "test_scheduler::test_replicas_that_make_other_calls_are_named",
    ),
    (
        "merge_call inside control flow: not refused, as nothing is traced",
        f"{REPLICAS}::test_merge_calls_in_loops_and_conditions",
    ),
    # -- run ---------------------------------------------------------------------------------------------------------
    (
        "run(fn, args, kwargs): args is a list or tuple, else ValueError",
        f"{STRATEGY}::test_run_gives_the_result_of_the_local_replica",
        f"{REPLICAS}::test_run_gives_each_replica_its_own_of_a_nest",
    ),
    (
        "every DistributedValues in the nests of args and kwargs becomes the replica's own",
        f"{REPLICAS}::test_run_gives_each_replica_its_own_of_a_nest",
        f"{REPLICAS}::test_run_gives_each_replica_its_own_and_returns_all",
    ),
    (
        "anything else goes to all replicas as it is",
        f"{REPLICAS}::test_run_gives_each_replica_its_own_and_returns_all",
    ),
    (
        "results are the nest of what fn returns, with PerReplica leaves",
        f"{REPLICAS}::test_run_gives_each_replica_its_own_and_returns_all",
    ),
    (
        "one replica per process, without num_replicas: the plain object comes back",
        f"{STRATEGY}::test_run_gives_the_result_of_the_local_replica",
    ),
    (
        "the same object from all replicas comes back plain",
        f"{REPLICAS}::test_run_gives_each_replica_its_own_and_returns_all",
    ),
    (
        "what run returns can be reduced, whatever numbers replicas return",
        f"{REPLICAS}::test_equal_numbers_are_values_of_every_replica",
    ),
    (
        "an error in one replica stops the others and is raised once",
        "test_scheduler::test_an_error_in_one_replica_stops_the_others_and_is_raised_once",
        f"{REPLICAS}::test_an_error_in_all_replicas_leaves_nothing_behind",
        "test_one_rank_fails::test_the_job_ends",
    ),
    # -- reduce ------------------------------------------------------------------------------------------------------
    ("reduce: axis has no default", f"{STRATEGY}::test_reduce_must_be_given_an_axis"),
    ("reduce: SUM or MEAN, or the strings in any case", f"{STRATEGY}::test_sum_over_replicas"),
    ("reduce: there is no MIN or MAX", f"{STRATEGY}::test_reduce_refuses"),
    ("reduce: axis=None combines over replicas only", f"{STRATEGY}::test_sum_over_replicas"),
    (
        "reduce: an int, tuple or list of axes is reduced inside each replica first",
        f"{STRATEGY}::test_mean_over_an_axis_weighs_by_rows",
    ),
    (
        "reduce: MEAN over an axis divides the global sum once, by the global number of elements",
        f"{STRATEGY}::test_mean_over_an_axis_weighs_by_rows",
        f"{STRATEGY}::test_mean_over_replicas_with_some_empty",
        f"{REPLICAS}::test_reduce_weighs_every_replica_alike_and_every_row",
    ),
    (
        "reduce: negative axes count from the end",
        f"{STRATEGY}::test_mean_over_an_axis_weighs_by_rows",
        f"{REPLICAS}::test_reduce_weighs_every_replica_alike_and_every_row",
    ),
    ("reduce: ValueError for an axis out of range", f"{STRATEGY}::test_reduce_refuses"),
    ("reduce: TypeError for an axis of a wrong type", f"{STRATEGY}::test_reduce_refuses"),
    (
        "reduce: nests are accepted with axis=None",
        f"{STRATEGY}::test_nests_are_reduced_over_replicas_only",
    ),
    (
        "reduce: the result lies on the host; of all_reduce and all_gather, where the value was",
        f"{PLACEMENT}::test_reduced_values_lie_on_the_host_or_in_a_replica_where_they_were",
    ),
    ("reduce: the result is the same on every worker", f"{GUIDES}::test_the_custom_training_loop"),
    # -- gather, all_gather, all_reduce ------------------------------------------------------------------------------
    (
        "gather is for cross-replica context; the message points at all_gather",
        f"{REPLICAS}::test_gather_joins_in_the_order_of_replicas",
    ),
    (
        "gather: at least one dimension, and equal ones but for the axis",
        f"{REPLICAS}::test_gather_joins_in_the_order_of_replicas",
        f"{STRATEGY}::test_gather_refuses_what_does_not_fit_on_all_ranks",
    ),
    (
        "gather: a misfit among the replicas of one rank is refused on all ranks",
        f"{REPLICAS}::test_a_misfit_on_one_rank_is_an_error_on_all",
    ),
    (
        "gather: parts may differ along the axis, and come in the order of replicas",
        f"{REPLICAS}::test_gather_joins_in_the_order_of_replicas",
    ),
    ("gather: sparse values are refused", f"{STRATEGY}::test_sparse_values_are_refused"),
    ("all_reduce takes nests", f"{REPLICAS}::test_all_reduce_and_all_gather_in_replicas"),
    (
        "all_reduce packs the tensors of a nest",
        f"{PACKED}::test_a_nest_is_summed_once_for_each_dtype",
        f"{PACKED}::test_packed_sums_are_in_the_order_of_replicas",
        f"{PACKED}::test_gradients_of_a_nest_are_summed_once_for_each_dtype",
    ),
    ("batch_reduce_to packs its values", f"{PACKED}::test_a_batch_of_values_is_reduced_in_one_go"),
    (
        "all_reduce and reduce take sparse values (torch's COO tensors): their entries are joined, not made dense",
        f"{PACKED}::test_entries_of_sparse_tensors_are_joined",
        f"{PACKED}::test_gradients_of_an_embedding_are_summed_as_they_are",
        f"{PACKED}::test_sparse_and_dense_are_not_added",
    ),
    ("all_reduce: sparse values have no gradient", f"{PACKED}::test_sparse_tensors_beside_ones_with_gradients"),
    (
        "all_reduce: the gradient of a dense value is the all-reduce of its gradient",
        f"{REPLICAS}::test_gradients_flow_through_all_reduce_and_all_gather",
    ),
    (
        "other calls, or in another order, on some replicas are found instead of a hang",
        f"{REPLICAS}::test_replicas_that_do_not_agree_are_named",
        "test_collectives::test_debug_names_the_rank_that_calls_something_else",
        "test_watchdog::test_every_rank_of_the_node_reports",
    ),
    (
        "ReplicaContext: replica_id_in_sync_group of the job, num_replicas_in_sync, strategy",
        f"{REPLICAS}::test_replica_context",
    ),
    (
        "experimental_local_results gives local parts only",
        f"{REPLICAS}::test_run_gives_each_replica_its_own_and_returns_all",
    ),
    # -- variables ---------------------------------------------------------------------------------------------------
    (
        "synchronization AUTO, NONE, ON_WRITE, ON_READ; aggregation NONE, SUM, MEAN, ONLY_FIRST_REPLICA",
        f"{VARIABLES}::test_it_is_not_trainable",
        f"{VARIABLES}::test_what_replicas_assign_is_aggregated",
        f"{VARIABLES}::test_each_replica_writes_its_own_copy_and_reading_aggregates",
        f"{VARIABLES}::test_outside_all_strategies_it_is_plain",
    ),
    (
        "operators, torch's functions and conversions read a variable; in place they are refused",
        f"{VARIABLES}::test_it_stands_for_its_value_in_expressions",
        f"{VARIABLES}::test_other_operators",
        f"{VARIABLES}::test_torch_and_numpy_take_it",
        f"{VARIABLES}::test_an_expression_reads_what_the_caller_sees",
        f"{VARIABLES}::test_in_place_it_is_refused",
    ),
    ("ON_READ with trainable=True is an error", f"{VARIABLES}::test_it_is_not_trainable"),
    ("AUTO is ON_WRITE", f"{VARIABLES}::test_what_it_is_made_of"),
    (
        "assigned in a replica without aggregation: ValueError that tells what to do",
        f"{VARIABLES}::test_without_aggregation_replicas_may_not_assign",
    ),
    (
        "assigned in replicas with aggregation: reduced, and all copies set",
        f"{VARIABLES}::test_what_replicas_assign_is_aggregated",
    ),
    ("ONLY_FIRST_REPLICA sends replica 0's value", f"{VARIABLES}::test_what_replicas_assign_is_aggregated"),
    (
        "a replica reads its own copy",
        f"{VARIABLES}::test_what_replicas_assign_is_aggregated",
        f"{VARIABLES}::test_each_replica_writes_its_own_copy_and_reading_aggregates",
    ),
    (
        "scatter_update is for NONE and ONLY_FIRST_REPLICA",
        f"{VARIABLES}::test_scatter_update_is_for_some_only",
        f"{VARIABLES}::test_scatter_update_of_the_first_replica",
    ),
    (
        "ON_READ: what replicas write stays theirs; a cross-replica read aggregates",
        f"{VARIABLES}::test_each_replica_writes_its_own_copy_and_reading_aggregates",
    ),
    (
        "ON_READ: metrics are such variables",
        "test_metrics::test_a_replica_sees_its_own",
        "test_metrics::test_it_is_that_of_all_rows",
    ),
    (
        "moving statistics are those of all replicas when they are read",
        f"{GRADIENTS}::test_batch_norm_statistics_are_averaged_and_other_buffers_keep_their_bits",
        "test_sync_batch_norm::test_it_is_torchs_of_the_whole_batch",
    ),
    (
        "ON_READ with SUM: a cross-replica assign divides the value among the copies",
        f"{VARIABLES}::test_a_total_is_divided_among_the_copies",
    ),
    (
        "ON_READ with SUM: save and restore keep the total",
        f"{VARIABLES}::test_every_replica_gets_its_copy_back",
        f"{VARIABLES}::test_other_replicas_get_what_it_was_read_as",
    ),
    (
        "ON_READ with SUM: cross-replica assign_add and assign_sub raise ValueError",
        f"{VARIABLES}::test_a_total_is_divided_among_the_copies",
    ),
    (
        "save is called by all workers and written by one",
        f"{VARIABLES}::test_every_replica_gets_its_copy_back",
        f"{STRATEGIES}::test_devices_and_who_writes",
        "test_checkpoint::test_a_save_that_fails_on_the_chief_is_an_error_on_all_ranks",
    ),
    (
        "gradients are summed over replicas, not averaged, once it is said that losses are scaled",
        f"{GRADIENTS}::test_grad_is_the_sum_over_replicas_when_backward_returns",
        f"{GRADIENTS}::test_nobody_said_how_gradients_combine",
    ),
    (
        "the loss carries the factor 1 / global batch",
        "test_equal_to_one_rank::test_n_ranks_train_as_one",
    ),
    (
        "an optimizer's slots are mirrored as its variables are",
        f"{REPLICAS}::test_a_restart_on_other_ranks_resumes_with_the_same_bits",
        f"{CENTRAL}::test_weights_are_those_of_mirrored_replicas",
    ),
    # -- input -------------------------------------------------------------------------------------------------------
    (
        "a global batch is split by ceiling division: 4 over 5, 4 over 3, 6 by 4 over 2",
        f"{DATASETS_ALONE}::test_parts_of_a_global_batch_as_in_tf_distribute",
        "test_plan::test_ceiling_split_of_tf_distribute",
    ),
    (
        "as many steps as global batches",
        f"{INPUTS_ALONE}::test_uneven_inputs_every_sample_once_and_exact_metrics",
    ),
    (
        "replicas with an empty part take part in all collectives",
        f"{INPUTS}::test_gradients_of_uneven_parts_are_those_of_the_global_batch",
        f"{INPUTS}::test_uneven_inputs_every_sample_once_and_exact_metrics",
        f"{INPUTS}::test_one_row_is_enough_for_all_replicas",
    ),
    (
        "drop_remainder: static shapes, and the tail is dropped",
        f"{INPUTS_ALONE}::test_element_spec",
        f"{INPUTS_ALONE}::test_uneven_inputs_every_sample_once_and_exact_metrics",
    ),
    (
        "without drop_remainder a partial batch comes at the same step on all ranks",
        f"{STRATEGY}::test_parts_of_a_distributed_dataset",
        f"{INPUTS}::test_uneven_inputs_every_sample_once_and_exact_metrics",
    ),
    (
        "FILE divides the list of files, and is an error when they are fewer than workers",
        f"{INPUTS_ALONE}::test_policy_file_reads_own_files_in_as_many_steps_on_all",
        f"{INPUTS_ALONE}::test_shard_by_policy",
    ),
    ("DATA: every worker reads all and keeps each n-th row (Dataset.shard)", f"{INPUTS_ALONE}::test_shard_by_policy"),
    (
        "OFF gives everyone all rows, global/N at a time",
        f"{INPUTS_ALONE}::test_policy_off_gives_every_replica_all_rows_in_parts_of_the_global_batch",
        f"{INPUTS_ALONE}::test_shard_by_policy",
    ),
    (
        "AUTO is FILE for rows of files, else DATA, and too few files are no reason for DATA (Dataset.shard)",
        f"{INPUTS_ALONE}::test_shard_by_policy",
    ),
    (
        "AUTO and DATA in experimental_distribute_dataset: one global order over all files",
        f"{INPUTS}::test_hdf5_files_are_read_in_one_global_order",
    ),
    (
        "HINT puts the real shard in place of a marked one",
        f"{INPUTS_ALONE}::test_policy_hint_puts_the_real_shard_in_the_marked_place",
        f"{INPUTS_ALONE}::test_a_marked_shard_and_the_policy_hint_go_together",
    ),
    (
        "distribute_datasets_from_function adds no shard, batch or prefetch",
        f"{INPUTS_ALONE}::test_datasets_from_a_function_are_left_as_they_are",
    ),
    (
        "get_per_replica_batch_size: ValueError unless replicas divide the global batch",
        f"{INPUTS_ALONE}::test_input_context",
    ),
    (
        "next ends on all workers at the same step",
        f"{INPUTS}::test_datasets_from_a_function_end_together",
        f"{INPUTS}::test_a_dataset_without_batches_ends_everywhere",
    ),
    (
        "get_next_as_optional where only some have data left: an element of no rows for the others",
        f"{INPUTS}::test_datasets_from_a_function_end_together",
    ),
    (
        "under parameter servers nothing is sharded: one pipeline, number 0",
        f"{COORDINATOR}::test_the_input_pipeline_of_a_worker_is_the_only_one",
        f"{COORDINATOR}::test_each_worker_has_all_of_a_dataset",
    ),
    # -- losses ------------------------------------------------------------------------------------------------------
    (
        "compute_average_loss is the weighted sum / global batch",
        f"{STRATEGY}::test_average_loss",
        f"{LOSSES}::test_weights_of_an_average_loss",
    ),
    ("its global batch is local rows x replicas by default", f"{STRATEGY}::test_average_loss"),
    (
        "a short last batch takes the global batch size that is given",
        "test_equal_to_one_rank::test_n_ranks_train_as_one",
    ),
    ("its weights scale, and do not enter the divisor", f"{LOSSES}::test_weights_of_an_average_loss"),
    ("a global batch of zero gives zero", f"{STRATEGY}::test_average_loss"),
    (
        "scale_regularization_loss is the sum / replicas",
        f"{LOSSES}::test_parts_of_a_regularization_loss_add_up_to_it",
    ),
    (
        "a loss already reduced to one number, without a global batch size: ValueError, asking for reduction='none'",
        f"{STRATEGY}::test_average_loss",
    ),
]

#: How the rows begin that may not be missing: what a program cannot be ported without.
MUST = (
    "MirroredStrategy(devices, cross_device_ops)",
    "MultiWorkerMirroredStrategy(cluster_resolver, communication_options)",
    "ParameterServerStrategy(cluster_resolver, variable_partitioner)",
    "ParameterServerStrategy of TensorFlow 1: every worker loops",
    "CentralStorageStrategy: variables once on the host",
    "CentralStorageStrategy with one device: everything is on it",
    "OneDeviceStrategy(device): what is made is placed there",
    "OneDeviceStrategy(device): inputs are fetched ahead",
    "the default strategy: one object that passes through, without scope, and reduces",
    "TPUStrategy: resolver, connect, initialize, strategy",
    "scope, run, reduce and gather are there",
    "experimental_local_results: this process's replicas; num_replicas_in_sync: of the job",
    "experimental_make_numpy_dataset: arrays held once, then distributed",
    "experimental_distribute_dataset takes the global batch and divides it",
    "a distributed dataset reads ahead",
    "iterators: iter, next, get_next, get_next_as_optional().has_value()",
    "iterators and distributed datasets have an element_spec",
)


@functools.cache
def functions_of(path):
    """Return the names of the test functions of the files of a name, wherever they are; none if there is no file."""
    trees = [ast.parse(found.read_text()) for found in (ROOT / "tests").rglob(f"{path}.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if node.name.startswith("test_")}


def is_covered(by):
    """Return whether an entry is a test that exists, or says what is missing."""
    path, _, name = by.partition("::")
    if name:
        return name in functions_of(path)
    return by.startswith("open: ") and len(by) > len("open: ")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_every_promise_has_a_test_or_says_what_will_be(row):
    promise, *covered_by = row
    assert covered_by, f"{promise}: name a test, or 'open: what is missing'"
    assert [by for by in covered_by if not is_covered(by)] == []


@pytest.mark.parametrize("beginning", MUST)
def test_no_row_is_missing_that_must_be_there(beginning):
    assert any(row[0].startswith(beginning) for row in ROWS)


def test_promises_are_listed_once():
    promises = [row[0] for row in ROWS]
    assert [promise for promise in promises if promises.count(promise) > 1] == []


@pytest.mark.parametrize("by", [f"{REPLICAS}::test_nothing", "none::test_merge_call", "open: ", "some day", ""])
def test_what_covers_nothing_is_refused(by):
    assert not is_covered(by)
