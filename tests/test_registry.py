"""The registry: a kernel that cannot be loaded says why in one line, and costs no other kernel anything."""

import subprocess
import sys
from pathlib import Path

import pytest

from autotune import kernel as registry
from autotune import presets
from autotune.errors import AutotuneError, UsageError
from search_spaces.matmul import MatmulKernel

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    "b_raises": "raise ValueError('boom\\nline two')",
    "b_syntax": "def (",
    "b_exit": "import sys; sys.exit(7)",
    "b_prints": "print('hello')\nfrom search_spaces.matmul import MatmulKernel",
    "b_ok": """
from autotune.kernel import Kernel
from search_spaces.matmul import MatmulKernel
nothing, text = None, "word"
class Abstract(Kernel):
    name = "abstract"
class Raises(MatmulKernel):
    def __init__(self): raise KeyError("as it is made")
class NoProblems(MatmulKernel):
    problems = {}
class BadProblems(MatmulKernel):
    problems = {"small": {"m": 1}}
class BadSources(MatmulKernel):
    sources = ("b_exit",)
instance = MatmulKernel()
""",
}
BROKEN = {
    "raises": ("b_raises:K", "ValueError: boom line two"),
    "syntax": ("b_syntax:K", "SyntaxError: "),
    "exits": ("b_exit:K", "SystemExit: 7"),
    "module": ("b_nowhere:K", "ModuleNotFoundError: No module named 'b_nowhere'"),
    "attribute": ("b_ok:Nope", "AttributeError: module 'b_ok' has no attribute 'Nope'"),
    "abstract": ("b_ok:Abstract", "TypeError: Can't instantiate abstract class Abstract"),
    "none": ("b_ok:nothing", "TypeError: must be an autotune.kernel.Kernel, not NoneType"),
    "word": ("b_ok:text", "TypeError: must be an autotune.kernel.Kernel, not str"),
    "init": ("b_ok:Raises", "KeyError: 'as it is made'"),
    "no-problems": ("b_ok:NoProblems", "ValueError: NoProblems.problems must name at least one Problem"),
    "bad-problems": ("b_ok:BadProblems", "must name at least one Problem"),
    "malformed": ("not a reference", ""),
}
GOOD = {"instance": "b_ok:instance", "bad-sources": "b_ok:BadSources", "prints": "b_prints:MatmulKernel"}


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """A distribution ``theirs`` with all of these kernels."""
    for module, text in MODULES.items():
        (tmp_path / f"{module}.py").write_text(text)
        monkeypatch.delitem(sys.modules, module, raising=False)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    entries = {name: value for name, (value, _) in BROKEN.items()} | GOOD
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[autotune.kernels]", *lines, ""]))
    monkeypatch.syspath_prepend(str(tmp_path))
    for cached in (registry.get_kernel, registry.kernel_names):
        cached.cache_clear()
    yield tmp_path
    for cached in (registry.get_kernel, registry.kernel_names):
        cached.cache_clear()
    for module in MODULES:
        sys.modules.pop(module, None)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_says_why_in_one_line(third_party, name):
    value, why = BROKEN[name]
    with pytest.raises(AutotuneError) as caught:
        registry.get_kernel(name)
    message = str(caught.value)
    assert message.startswith(f"kernel {name!r} ({value} of theirs) cannot be loaded: ")
    assert why in message
    assert "\n" not in message
    assert len(message) < 600


def test_broken_kernels_leave_the_others_alone(third_party, capsys):
    names = registry.kernel_names()
    assert {"matmul", "attention", *BROKEN, *GOOD} <= set(names)
    loaded = 0
    for name in names:
        try:
            loaded += bool(registry.get_kernel(name).problems)
        except AutotuneError:
            assert name in BROKEN
    assert loaded == len(names) - len(BROKEN)
    assert capsys.readouterr().out == ""  # b_prints printed, but not into a command's result


def test_hosts_are_compared_whatever_cannot_be_loaded(third_party):
    assert presets.digest("v5e") == presets.digest("TPU v5 lite")


def test_a_version_that_cannot_be_had_says_why(third_party):
    with pytest.raises(AutotuneError, match="kernel 'matmul': its source b_exit cannot be read: SystemExit: 7"):
        _ = registry.get_kernel("bad-sources").version
    assert len(MatmulKernel().version) == 12


def test_an_unknown_kernel_is_bad_usage(third_party):
    with pytest.raises(UsageError, match="unknown kernel 'nope': use "):
        registry.get_kernel("nope")


@pytest.mark.parametrize("namespace", [False, True])
def test_another_projects_kernels_package_is_named(tmp_path, namespace):
    """Hugging Face's ``kernels``, found first."""
    package = tmp_path / "kernels"
    package.mkdir()
    if not namespace:
        (package / "__init__.py").write_text("")
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.path.insert(0, {str(tmp_path)!r})\n"
        "from autotune import kernel\n"
        "print(kernel.foreign_kernels_package())\n"
        "try: print(kernel.get_kernel('matmul'))\n"
        "except kernel.AutotuneError as error: print(error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    found, loaded = run.stdout.strip().splitlines()
    if namespace:  # A regular package wins over a mere folder.
        assert found == "None"
        assert "MatmulKernel object" in loaded
    else:
        assert found.startswith(f"{package} is another project's: pip uninstall kernels")
        assert loaded.startswith("kernel 'matmul' (search_spaces.matmul:MatmulKernel")
        assert found in loaded


def test_this_projects_package_is_not_another_projects():
    assert registry.foreign_kernels_package() is None
