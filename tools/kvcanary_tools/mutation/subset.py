"""The unit subset: the tests that each mutant meets. Together they take at most MOST_SECONDS of one core's time.

That is the processor time of the tests and their fixtures; imports are apart, since mutants are forked from a process
that has imported everything.
"""

from __future__ import annotations

MOST_SECONDS = 3.0
KERNELS = (
    "admit", "advance", "attention", "begin", "candidates", "chain", "content", "count", "fetch", "fingerprint",
    "finite", "index", "merging", "move", "plan", "poison", "post", "put", "record", "reference_arguments",
    "references", "relay", "scatter", "seal", "store", "stored", "verify", "verify_truth", "walk",
)  # fmt: skip
CANARY = (
    "facts", "finding_log", "ledger", "lifetimes", "pages", "row_book", "rules_bytes", "rules_rows", "rules_writes",
    "static", "static_hooks", "uids",
)  # fmt: skip
TESTS = (
    *(f"tests/kernels/test_{name}.py" for name in KERNELS),
    *(f"tests/kvcanary/test_{name}.py" for name in CANARY),
)
#: Left to the whole suite: large operands and whole engines take too long, and a mutated module has other names and
#: frames than those that some tests look at.
LEFT_OUT = (
    "tests/kernels/test_attention.py::test_chains",
    "tests/kernels/test_attention.py::test_operands_that_do_not_fit",
    "tests/kernels/test_attention.py::test_tiles_that_end_inside_a_token",
    "tests/kernels/test_fingerprint.py::test_a_zeroed_row_has_its_layers_constant",
    "tests/kernels/test_fingerprint.py::test_few_long_rows_have_a_program_each",
    "tests/kernels/test_fingerprint.py::test_fingerprint_of_rows_of_any_length",
    "tests/kernels/test_plan.py::test_kernels_equal_their_references",
    "tests/kernels/test_reference_arguments.py::test_a_reference_launches_nothing",
    "tests/kernels/test_stored.py::test_many_rows_share_programs",
    "tests/kernels/test_walk.py::test_kernel_and_reference_agree_bit_for_bit",
    "tests/kernels/test_verify_truth.py::test_verify_compares_with_the_truth",
    "tests/kvcanary/test_ledger.py::test_freeing_twice_is_refused",
    "tests/kvcanary/test_ledger.py::test_the_manager_refuses",
    "tests/kvcanary/test_pages.py::test_every_event_in_every_state",
    "tests/kvcanary/test_pages.py::test_history_keeps_events_of_several_requests",
    "tests/kvcanary/test_pages.py::test_history_knows_the_line_of_the_caller",
    "tests/kvcanary/test_rules_bytes.py::test_every_rule_is_in_the_table",
    "tests/kvcanary/test_rules_rows.py::test_every_rule_is_in_the_table",
    "tests/kvcanary/test_rules_writes.py::test_every_rule_is_in_the_table",
    "tests/kvcanary/test_static_hooks.py::test_hooks_run_no_torch_operation_but_launches",
    "tests/kvcanary/test_static.py::test_a_postponed_forward_tells_the_same",
    "tests/kvcanary/test_static.py::test_interpreted_kernels_tell_the_same",
)
OPTIONS = (
    *("-p", "no:cacheprovider", "-p", "kvcanary_tools.mutation.clock"),
    *("-k", "not triton"),
    *("-m", "not gpu and not slow"),
    *(f"--deselect={name}" for name in LEFT_OUT),
)
