"""Completions in the think-answer format."""

from __future__ import annotations


def think_answer(answer: str) -> str:
    """Return a completion in the format with this answer."""
    return f"<think> t </think> <answer>{answer}</answer>"
