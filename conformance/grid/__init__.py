"""The grid: one module per family of cases, each with `cases() -> Iterable[Case]`.

How to add a family:
 1. Write `conformance/grid/<family>.py` and list it in `suite.FAMILIES`. Start from rms_norm.py (statistical) or
    gemm.py (exact and statistical). Enumerate points plainly: pairwise, plus every forced edge of the specification.
 2. A point becomes a Case: name "family/point" (stable; gaps.toml and reports name it), op, spec, axes (strings, for
    the matrix), lanes, profiles, faults (names of mutants that it is there to catch), requires (`computes_in`,
    `stores_weights_in`, `stores_kv_in`, `all_of`), and `build` = functools.partial of a module-level function.
 3. `build(draw) -> Trial` draws host tensors from `draw` only, and returns given / wanted / updated tensors, weights
    (HostWeight), pools (HostPool), `run(bench)` and `check(outputs) -> list[Finding]`.
      run    only bench["name"], bench.weight(…), bench.kv(…), bench.metadata(…), bench.plan(…), bench.op(op, spec)(…)
      check  only host tensors, conformance.oracle (float64) and conformance.lanes
 4. In the statistical lane derive the bound in a comment in lanes/tolerance.py; never widen one to make a case pass.
 5. Run it on the reference, honestly and broken: tests/conformance/test_families.py picks new families up by itself.
Profiles: "smoke" takes few cases of each op, "core" all that every backend must pass. The harness does the rest:
guard bands, two poisons, inputs unchanged, outputs written, finite, not all zero, bitwise twice.
"""
