"""Ways into libc at which a table decides: a call with a marked number goes to Python, any other straight on.

``write`` is also called by handlers of signals, by threads that must not wait for Python's lock, and between a fork and
the program that it starts, none of which may run Python. So what looks the number up are a few instructions of the
machine, and only numbers of what was open before a dry run, which none of these use, are marked.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Collection, Mapping

HAS_GATES = sys.platform == "linux" and platform.machine() == "x86_64"
_MOST_NUMBERS = 1 << 20  # as many as Linux lets a process have (fs.nr_open); higher ones are never marked

# What a call goes by: where a function is, where its stand-in is, and which arguments are numbers of files.
Ways = Mapping[str, tuple[int, int, Collection[int]]]


class Gates:
    """A table of marked numbers, and the addresses of ways into functions, which look in it.

    They are there for good, as a thread may be inside of one. Raises OSError where the system allows no such memory.
    """

    def __init__(self, ways: Ways) -> None:
        self._table = mmap.mmap(-1, _MOST_NUMBERS)
        self._marked: list[int] = []
        self.addresses: dict[str, int] = {}
        table, made = _address_of(self._table), b""
        for name, (function, stand_in, places) in ways.items():
            self.addresses[name] = len(made)
            made += _instructions(table, function, stand_in, places)
        self._code = mmap.mmap(-1, len(made))
        self._code.write(made)
        begin = _address_of(self._code)
        self.addresses = {name: begin + at for name, at in self.addresses.items()}
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_size_t(begin), ctypes.c_size_t(len(made)), mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "mprotect")

    def mark(self, numbers: Collection[int]) -> None:
        """From now on these go to the stand-ins, and no others."""
        before, self._marked = self._marked, [number for number in numbers if number < _MOST_NUMBERS]
        for number in {*before, *self._marked}:
            self._table[number] = number in self._marked


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _instructions(table: int, function: int, stand_in: int, places: Collection[int]) -> bytes:
    """System V ABI: the first arguments are in rdi, rsi and rdx; r10 and r11 are free."""
    made = b"\x49\xbb" + struct.pack("<Q", table)  # mov r11, table
    jump = b"\x49\xbb%s\x41\xff\xe3"  # mov r11, ...; jmp r11
    for place in places:
        made += b"\x41\x89" + (b"\xfa", b"\xf2", b"\xd2")[place]  # mov r10d, argument
        made += b"\x41\x81\xfa" + struct.pack("<I", _MOST_NUMBERS)  # cmp r10d, _MOST_NUMBERS
        made += b"\x73\x14"  # jae: past this argument
        made += b"\x43\x80\x3c\x13\x00\x74\x0d"  # cmp byte [r11 + r10], 0; je: past this argument
        made += jump % struct.pack("<Q", stand_in)
    return made + jump % struct.pack("<Q", function)
