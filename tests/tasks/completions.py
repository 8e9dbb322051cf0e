r"""Completions in the think-answer format, and answers that are too costly for a computer-algebra system."""

from __future__ import annotations

# Most of these used up the whole time limit of the scoring process.
COSTLY_ANSWERS = (
    r"\sum_{k=1}^{9999}\frac{1}{k}",
    r"99^{999!}",
    r"(x+y+z+w)^{999}",
    r"\binom{9999}{4999}^{9999}",
    r"\frac{1}{1+" * 30 + "1" + "}" * 30,
    "(" * 150 + "1" + ")" * 150,
    r"\{" * 60 + "1" + r"\}" * 60,
    "|" * 60 + "x" + "|" * 60,
    r"\prod_{k=1}^{9999}k",
    r"\int_0^1 x^{x^x} dx",
    r"\lim_{n\to\infty}(1+\frac{1}{n})^{n^n}",
    r"((((9^{99})^{99})^{99})^{99})",
    r"9^{9^{9^{9}}}",
    "9**9**9**9",
    "9^9^9^9",
    "2^{99999999}",
    "99999999!",
    r"2^{2^{2^{2^{2^2}}}}",
    r"999!!!",
    r"(\exp(9))!",
    r"\binom{99999999}{44444444}",
    r"(a+b+c+d+e+f)^{40}",
    r"(x+1)^{50}(y+1)^{50}(z+1)^{50}",
    r"\frac{1}{x+y}+\frac{1}{y+z}+\frac{1}{z+w}+\frac{1}{w+v}+\frac{1}{v+u}+\frac{1}{u+t}+\frac{1}{t+s}+\frac{1}{s+r}",
    r"\sqrt{" * 40 + "2" + "}" * 40,
    "+".join(f"\\sqrt{{{prime}}}" for prime in (2, 3, 5, 7, 11, 13, 17, 19)),
    r"\sin(3n)/|\sqrt[9999]{5}|",
    r"7^{1/9999}",
    r"\sin(\cos(\tan(\sin(\cos(\tan(\sin(\cos(x))))))))",
    r"\operatorname{eye}(99999)",
    r"\gcd(9^{9999},8^{9999})!",
    r"\frac{d^{99}}{dx^{99}} \sin(x^{99})",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{99999}",
    r"\exp(\begin{pmatrix} x & t \\ 2 & 2 \end{pmatrix})",
    r"w \cdot \sqrt{\sqrt{\sqrt{\begin{pmatrix} 3 & 9 \\ t & x \end{pmatrix}}}}",
    r"(5/12/\arctan(12))((72+w)!)",
    r"x^{\log(\log(9999))+999 \cdot \sqrt{7}}",
    r"|x^{99}|^{\sin(9999)}",
    r"|9^{999}|^{999}",
    r"\lfloor 9^{999} \rfloor^{999}",
    r"(x-99)!",
    r"||9||^{(999)^{99} \cdot (999)!}",
    r"\ln(123457) \cdot (99)^{72}",
    r"\frac{(12)^{999}}{5+5}/1+\log(x)",
    r"\det\begin{pmatrix}" + r"\\".join("&".join("abcdefgh") for _ in range(8)) + r"\end{pmatrix}",
    "9" * 400,
    "1+" * 5000 + "1",
)


def think_answer(answer: str) -> str:
    """Return a completion in the format with this answer."""
    return f"<think> t </think> <answer>{answer}</answer>"
