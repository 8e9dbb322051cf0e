"""An independent reference of the filter `obrs`: Jackpot's acceptance, and its random numbers in Python integers."""

import math
import struct

WORD = 2**32


def mixed(value: int) -> int:
    """Return the finalizer of MurmurHash3 of a 32-bit word."""
    value ^= value >> 16
    value = value * 0x85EBCA6B % WORD
    value ^= value >> 13
    value = value * 0xC2B2AE35 % WORD
    return value ^ value >> 16


def uniform_number(group_id: int, place: int, column: int, behaviour_logprob: float) -> float:
    """Return the hash of low and high half of the id, the place, the column, and both halves of the log-prob."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", behaviour_logprob))
    id_bits = group_id % 2**64
    state = 0
    for word in (id_bits % WORD, id_bits // WORD, place, column, bits % WORD, bits // WORD):
        state = mixed(state ^ word)
    return (state + 0.5) / WORD


def acceptance(lp0: float, lg: float, threshold: float) -> float:
    """Return min(1, pi / (lambda mu)), with the log-ratio within +-20."""
    return min(1.0, math.exp(max(-20.0, min(20.0, lp0 - lg))) / threshold)
