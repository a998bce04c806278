"""Other tuners' tables as starts, and presets in their formats."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.chips import get_chip
from autotune.engines import Task
from autotune.errors import ResultsError, UsageError
from autotune.interop import export, read, starting_configs
from autotune.kernel import get_kernel, kernel_names
from autotune.outcome import Outcome, Source, Status
from autotune.presets import Preset
from autotune.search import TrialRecord
from autotune.search.study import load_records

ATTENTION = {"q": "bf16[4,4096,64,128]", "k": "bf16[4,4096,64,128]", "v": "bf16[4,4096,64,128]", "bias": None}
BLOCKS = {"block_q": 1024, "block_kv": 2048, "block_kv_compute": 512, "q_layout": 1, "use_base2_exp": True}


def cache(*rows: tuple[dict, dict]) -> str:
    """A file as tokamax keeps it: arguments to configs to benchmarks, keys as JSON in strings."""
    benchmark = {"evaluation_times_ms": [2.0, 1.0, 1.5]}
    return json.dumps({json.dumps(arguments): {json.dumps(config): benchmark} for arguments, config in rows})


def write(tmp_path: Path, text: str, name: str = "table.json") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def task(kernel: str, problem: str | None = None, target: str = "v6e") -> Task:
    found = get_kernel(kernel)
    return Task(found, found.parse_problem(problem), get_chip(target))


def test_a_tokamax_cache_is_read(tmp_path):
    (row,) = read(write(tmp_path, cache((ATTENTION, BLOCKS))))
    assert row.op == "attention"
    assert row.sizes == {"batch": 4, "q_len": 4096, "heads": 64, "head_dim": 128, "kv_len": 4096, "kv_heads": 64}
    assert row.blocks == {**BLOCKS, "q_layout": "HEAD_DIM_MINOR"}
    assert row.time_ms == 1.5


def test_of_an_instance_the_fastest_config_counts(tmp_path):
    slow, fast = ({**BLOCKS, "block_q": size} for size in (512, 2048))
    tried = {json.dumps(slow): {"evaluation_times_ms": [3.0]}, json.dumps(fast): {"evaluation_times_ms": [2.0]}}
    (row,) = read(write(tmp_path, json.dumps({json.dumps(ATTENTION): tried})))
    assert row.blocks["block_q"] == 2048


def test_a_tokamax_result_is_read(tmp_path):
    config = {"tile_m": 256, "tile_k": 1024, "tile_n": 512, "input_buffer_count": 2}
    arguments = {"lhs": "bf16[8192,1024]", "rhs": "bf16[8,512,1024]", "group_sizes": {"num_groups": 8}}
    pair = [{"op": "ragged_dot", "arguments": arguments}, {json.dumps(config): {"evaluation_times_ms": [1.0]}}]
    (row,) = read(write(tmp_path, json.dumps({"device_kind": "TPU v5 lite", "data": [pair]})))
    assert (row.op, row.sizes) == ("gmm", {"m": 8192, "k": 1024, "n": 512, "groups": 8})


PYTHON = """
from somewhere import nothing

raise SystemExit("must not run")
TUNED_BLOCK_SIZES = {
    (4096, 2560, 6144, 160, 20, 'bfloat16', 'float8_e4m3fn', 2560): (128, 256 * 10, 256 * 12),
    'TPU v6': {('bfloat16', 'bfloat16', 12, 2, 128, 16, 1024, 256): (16, 32)},
    'TPU v7': {128: {'q_bfloat16_kv_bfloat16': {
        'q_head-8_kv_head-4_head-256': {'max_model_len-2048-sw-None': (16, 64)}}}},
    TunedKey(6, 1024, 4096, 8192, 'int8', 'int8'): TunedValue(512, 256, n_in=2048, extra=1),
    'unknown': make_it_up(),
}
"""


def test_the_tables_of_tpu_inference_are_read_and_not_run(tmp_path):
    rows = read(write(tmp_path, PYTHON, "tuned_block_sizes.py"))
    assert [(row.op, dict(row.sizes), dict(row.blocks)) for row in rows] == [
        ("gmm", {"m": 4096, "k": 2560, "n": 6144, "groups": 20}, {"tile_m": 128, "tile_k": 2560, "tile_n": 3072}),
        (
            "ragged_paged_attention",
            {"heads": 12, "kv_heads": 2, "head_dim": 128, "page_size": 16, "tokens": 1024, "pages_per_seq": 16},
            {"pages": 16, "queries": 32},
        ),
        (
            "ragged_paged_attention",
            {"heads": 8, "kv_heads": 4, "head_dim": 256, "page_size": 128, "pages_per_seq": 16},
            {"pages": 16, "queries": 64},
        ),
        ("matmul", {"m": 1024, "n": 4096, "k": 8192}, {"m": 512, "n": 256, "k": 2048}),
    ]


def test_quantized_matmuls_of_its_json_are_read(tmp_path):
    table = {
        "16,1024,4096,int8,int8": [16, 512, 2048],
        "16,1024,8192,int8,int8": {"config": {"b": 16, "o": 1024, "i": 512}},
    }
    rows = read(write(tmp_path, json.dumps(table)))
    assert [dict(row.blocks) for row in rows] == [{"m": 16, "n": 512, "k": 2048}, {"m": 16, "n": 1024, "k": 512}]


def test_jax_own_table_of_ragged_paged_attention_is_read():
    from importlib.util import find_spec

    spec = find_spec("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
    assert spec is not None
    rows = read(Path(spec.submodule_search_locations[0]) / "tuned_block_sizes.py")
    assert len(rows) > 1000
    assert {row.op for row in rows} == {"ragged_paged_attention"}


@pytest.mark.parametrize(
    ("text", "name", "error", "words"),
    [
        ("{", "x.json", ResultsError, "no JSON"),
        ("TABLE = {", "x.py", ResultsError, "line 1"),
        ("[]", "x.json", UsageError, "no row of it is understood"),
        ('{"a": {"b": 1}}', "x.json", UsageError, "no row of it is understood"),
        ('{"data": [[1, 2]], "x": null}', "x.json", UsageError, "no row of it is understood"),
        ("import os", "x.py", UsageError, "no row of it is understood"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, text, name, error, words):
    path = write(tmp_path, text, name)
    with pytest.raises(error, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="no text"):
        read(tmp_path / "binary.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["data", "q", "config", "1,2,3,a,b", "x"]), inner)
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_read_or_refused(tmp_path_factory, document):
    path = tmp_path_factory.mktemp("any") / "x.json"
    path.write_text(json.dumps(document))
    with contextlib.suppress(ResultsError, UsageError):
        assert read(path)
    shutil.rmtree(path.parent)


def test_a_start_takes_the_nearest_problems_first_and_what_the_space_holds(tmp_path):
    far = {**ATTENTION, "q": "bf16[1,65536,64,128]", "k": "bf16[1,65536,64,128]"}
    rows = [(far, {**BLOCKS, "block_q": 4096, "block_kv_compute": 256}), (ATTENTION, BLOCKS)]
    odd = ({**ATTENTION, "q": "bf16[4,4096,32,128]"}, {**BLOCKS, "block_kv_compute": 384})
    start = starting_configs(task("stock_splash"), [write(tmp_path, cache(*rows, odd))])
    assert start.rows == 3
    assert [dict(config) for config in start.configs] == [
        {"block_q": 1024, "block_kv": 2048, "block_kv_compute": 512},
        {"block_q": 4096, "block_kv": 2048, "block_kv_compute": 256},
    ]


def test_a_backward_kernel_of_one_pass_is_a_fused_one_here(tmp_path):
    config = {"block_q_dkv": 1024, "block_kv_dkv": 2048, "block_kv_dkv_compute": 512}
    arguments = {"dout": "bf16[4,4096,64,128]", **ATTENTION}
    start = starting_configs(task("stock_splash_bwd"), [write(tmp_path, cache((arguments, config)))])
    (found,) = start.configs
    assert found["use_fused_bwd_kernel"] is True
    assert (found["block_q_dq"], found["block_kv_dq"]) == (1024, 2048)


def test_tables_of_other_kernels_and_kernels_without_any_are_refused(tmp_path):
    path = write(tmp_path, cache((ATTENTION, BLOCKS)))
    with pytest.raises(UsageError, match=r"no row that matmul could use \(matmul\)"):
        starting_configs(task("matmul"), [path])
    with pytest.raises(UsageError, match="no other tuner's tables are known for rmsnorm"):
        starting_configs(task("rmsnorm"), [path])


def test_what_kernels_call_their_relatives_blocks_is_right():
    """Their parameters exist, in every space that has them at all."""
    for name in kernel_names():
        kernel = get_kernel(name)
        for names in kernel.relatives.values():
            space = kernel.space(kernel.problems[kernel.default_problem], get_chip("v5e"))
            assert set(names) <= set(space.params)


@pytest.mark.slow
def test_the_search_begins_with_a_start(tmp_path, command):
    table = write(tmp_path, cache((ATTENTION, BLOCKS)))
    done = command(
        "attention", "--start-from", str(table), "--trials", "3", "--target", "v5e", "--json",
        "--problem", "batch=1,heads=1,kv_heads=1,q_len=4096,kv_len=4096",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "of 1 rows of other tuners' tables, 1 configs fit the space and are tried first" in done.stderr
    (journal,) = (command.folder / "results" / "studies").glob("*.journal")
    records = load_records(command.folder / "results", journal.stem)
    assert records is not None
    begun = [dict(record.config) for record in records]
    assert {**begun[1], "block_q": 1024, "block_kv": 2048, "block_kv_compute": 512} == begun[1]


SPLASH = {"block_q": 2048, "block_kv": 2048, "block_kv_compute": 1024}
FUSED = {
    "block_q_dkv": 1024, "block_kv_dkv": 1024, "block_kv_dkv_compute": 512,
    "use_fused_bwd_kernel": True, "block_q_dq": 1024, "block_kv_dq": 1024,
}  # fmt: skip


def preset(kernel: str, config: dict, **changed) -> Preset:
    found = get_kernel(kernel)
    problem = found.parse_problem(None).to_dict() | changed
    return Preset(
        kernel=kernel, device_kind="TPU v6 lite", problem=problem, config=config, time_ms=6.0, method="schedule",
        engine="compiler", study="gone",
    )  # fmt: skip


def test_presets_become_tokamax_caches_that_are_read_back(tmp_path):
    gmm = preset("stock_gmm", {"tm": 256, "tk": 1024, "tn": 512})
    found = [preset("stock_splash", SPLASH), preset("stock_splash_bwd", FUSED), gmm]
    others = [
        preset("matmul", {"block_m": 128, "block_n": 128, "block_k": 128}),
        preset("stock_splash", SPLASH, window=1024),
        preset("stock_splash_bwd", {**FUSED, "use_fused_bwd_kernel": False}),
    ]
    written, left_out = export([(tmp_path / "x", one) for one in found + others], "tokamax", tmp_path)
    assert len(left_out) == 3
    assert [path.relative_to(tmp_path).as_posix() for path in written] == [
        "tpu_v6_lite/pallas_mosaic_tpu_flash_attention.json",
        "tpu_v6_lite/pallas_mosaic_tpu_flash_attention_vjp.json",
        "tpu_v6_lite/pallas_mosaic_tpu_ragged_dot.json",
    ]
    for path, one in zip(written, found, strict=True):
        (row,) = read(path)
        assert row.time_ms == 6.0
        assert all(row.sizes[name] == one.problem[name] for name in row.sizes)
        start = starting_configs(task(one.kernel), [path])
        assert [dict(config) for config in start.configs] == [one.config]
        assert '"times": "predicted"' in path.read_text()


def test_tokamax_itself_reads_them(tmp_path):
    cache_module = pytest.importorskip("tokamax._src.autotuning.cache", reason="tokamax is not installed")
    from tokamax._src.ops.attention.pallas_mosaic_tpu import PallasMosaicTpuFlashAttention

    ((path,), _) = export([(tmp_path / "x", preset("stock_splash", SPLASH))], "tokamax", tmp_path)
    op = PallasMosaicTpuFlashAttention()
    data = cache_module._get_cache_adapter(op).validate_json(path.read_text())
    ((arguments, tried),) = data.items()
    assert op.bind(**arguments).autotuning_cache_key["logits_scale"] == 1 / math.sqrt(128)
    assert tried.fastest_config.block_q == 2048


def test_a_run_becomes_a_t4_document(tmp_path, monkeypatch):
    records = [
        TrialRecord(0, {"block_q": 128}, Outcome(Status.OK, time_ms=2.0, source=Source.SCHEDULE, compile_s=1.5)),
        TrialRecord(1, {"block_q": 4096}, Outcome(Status.VMEM_OOM, message="too large")),
        TrialRecord(2, {"block_q": 64}, Outcome(Status.INVALID, message="not aligned")),
    ]
    monkeypatch.setattr("autotune.search.study.load_records", lambda results, name: records if name == "here" else None)
    one = preset("stock_splash", SPLASH)
    here = dataclasses.replace(one, study="here")
    written, left_out = export([(tmp_path / "p" / "d" / "k.json", one), (tmp_path, here)], "t4", tmp_path)
    assert not left_out
    alone, whole = (json.loads(path.read_text()) for path in written)
    assert alone["schema_version"] == "1.0.0"
    assert [(r["configuration"], r["invalidity"]) for r in alone["results"]] == [(SPLASH, "correct")]
    assert [(r["invalidity"], r["correctness"]) for r in whole["results"]] == [
        ("correct", 1), ("compile", 1), ("constraints", 1),
    ]  # fmt: skip
    assert whole["results"][0]["times"] == {"compilation_time": 1500.0, "runtimes": []}
    assert {"name": "time", "value": 2.0, "unit": "ms"} in whole["results"][0]["measurements"]
    assert whole["metadata"]["times"] == "predicted"


def test_the_command_exports(command):
    done = command("presets", "export", "matmul", "--to", "t4", "--out", "there")
    assert done.returncode == 0, done.stderr
    assert list((command.folder / "there").glob("matmul-*.json"))
    nothing = command("presets", "export", "matmul", "--to", "tokamax", "--out", "there")
    assert nothing.returncode == 1
    assert "presets left out: tokamax has no such operation or config" in nothing.stdout
    assert "--to tokamax or t4" in command("presets", "export").stderr
