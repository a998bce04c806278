"""Problems from text: names, fields, and what is refused, for every kernel shipped."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import UsageError
from search_spaces.attention import AttentionKernel
from search_spaces.matmul import MatmulKernel

KERNELS = [MatmulKernel(), AttentionKernel()]
SIZES = st.integers(1, 100_000)


@given(m=SIZES, n=SIZES, k=SIZES, dtype=st.sampled_from(["bfloat16", "float32"]))
def test_matmul_problem_survives_text(m, n, k, dtype):
    problem = MatmulKernel().parse_problem(f"m={m}, n={n},k={k},dtype={dtype}")
    assert (problem.m, problem.n, problem.k, problem.dtype) == (m, n, k, dtype)
    assert MatmulKernel().parse_problem(str(problem)) == problem
    assert type(problem).from_dict(problem.to_dict()) == problem


@given(
    kv_heads=st.integers(1, 16), group=st.integers(1, 8), q_len=SIZES, more=st.integers(0, 5000), causal=st.booleans()
)
def test_attention_problem_survives_text(kv_heads, group, q_len, more, causal):
    kernel = AttentionKernel()
    text = f"heads={kv_heads * group},kv_heads={kv_heads},q_len={q_len},kv_len={q_len + more},causal={causal}"
    problem = kernel.parse_problem(text)
    assert (problem.heads, problem.kv_len, problem.causal) == (kv_heads * group, q_len + more, causal)
    assert kernel.parse_problem(str(problem)) == problem


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_named_problems(kernel):
    assert kernel.parse_problem(None) == kernel.problems[kernel.default_problem]
    for name, problem in kernel.problems.items():
        assert kernel.parse_problem(name) == problem
        assert kernel.parse_problem(f"{name},dtype=float32").dtype == "float32"
        assert kernel.cost(problem).flops > 0
        assert len(kernel.arguments(problem)) >= 2


def test_the_default_attention_is_llama_3_8b_prefill():
    problem = AttentionKernel().parse_problem(None)
    assert str(problem) == (
        "batch=1,heads=32,kv_heads=8,q_len=4096,kv_len=4096,head_dim=128,dtype=bfloat16,causal=true"
    )


@pytest.mark.parametrize(
    ("kernel", "text", "says"),
    [
        (MatmulKernel(), "m=0", "m=0: must be a positive integer"),
        (MatmulKernel(), "m=-4", "must be a positive integer"),
        (MatmulKernel(), "m=1000000000000000", "m=1000000000000000: must be at most 2147483647"),
        (AttentionKernel(), "kv_len=2147483648", "kv_len=2147483648: must be at most 2147483647"),
        (MatmulKernel(), "m=1.5", "must be an integer"),
        (MatmulKernel(), "dtype=int3", "must be bfloat16, float32, int8, float8_e4m3fn or float8_e5m2"),
        (MatmulKernel(), "rows=3", "unknown problem field 'rows': use m, n, k, dtype, transpose_lhs"),
        (MatmulKernel(), "activation=tanh", "activation=tanh: must be none, relu, gelu or silu"),
        (MatmulKernel(), "dtype=int8,bias=true", "use bias=false,activation=none"),
        (MatmulKernel(), "dtype=int8,activation=relu", "use bias=false,activation=none"),
        (MatmulKernel(), "no-such-model", "no problem named 'no-such-model'"),
        (MatmulKernel(), "m=4,m=5", "m is given twice"),
        (AttentionKernel(), "heads=32,kv_heads=7", "kv_heads=7 does not divide heads=32: use 1, 2, 4, 8, 16 or 32"),
        (AttentionKernel(), "q_len=8192", "use q_len of 4096 at most, or causal=false"),
        (AttentionKernel(), "causal=perhaps", "must be true or false"),
    ],
)
def test_bad_problems_say_what_would_be_right(kernel, text, says):
    with pytest.raises(UsageError) as caught:
        kernel.parse_problem(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=200)
@given(text=st.text(alphabet="mnkd=,0123456789. -e", max_size=20))
def test_any_text_is_a_problem_or_a_usage_error(text):
    try:
        problem = MatmulKernel().parse_problem(text)
    except UsageError:
        return
    assert min(problem.m, problem.n, problem.k) >= 1
