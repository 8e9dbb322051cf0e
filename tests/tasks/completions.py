r"""Completions in the think-answer format, and answers that are too costly for a computer-algebra system."""

# Most of these used up the whole time limit of the scoring process.
COSTLY_ANSWERS = (
    r"\sum_{k=1}^{9999}\frac{1}{k}", r"99^{999!}", r"\frac{1}{1+" * 30 + "1" + "}" * 30, "|" * 60 + "x" + "|" * 60,
    r"\int_0^1 x^{x^x} dx", r"((((9^{99})^{99})^{99})^{99})", r"9^{9^{9^{9}}}", "9**9**9**9", "2^{99999999}",
    "99999999!", r"999!!!", r"\binom{99999999}{44444444}",
    "+".join(f"\\sqrt{{{prime}}}" for prime in (2, 3, 5, 7, 11, 13, 17, 19)), r"\sin(3n)/|\sqrt[9999]{5}|",
    r"\sin(\cos(\tan(\sin(\cos(\tan(\sin(\cos(x))))))))", r"\operatorname{eye}(99999)",
    r"\frac{d^{99}}{dx^{99}} \sin(x^{99})", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{99999}",
    r"\begin{pmatrix}" + r"\\".join("&".join("abcdefgh") for _ in range(8)) + r"\end{pmatrix}", "9" * 400,
    "1+" * 5000 + "1", "^".join("x" * 30),
)  # fmt: skip
COSTLY_WITHIN_LIMITS = r"(x+y+z+w)^{999}"


def think_answer(answer: str) -> str:
    """Return a completion in the format with this answer."""
    return f"<think> t </think> <answer>{answer}</answer>"
