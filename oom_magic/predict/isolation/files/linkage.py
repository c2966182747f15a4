"""Replaces, for a while, the addresses by which C libraries call libc.

A library calls ``open`` through a word in its own memory that the loader filled in (System V ABI, "Global Offset
Table"); its relocations list these words. Only 64-bit Linux is supported.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# Relocations that hold the address of a symbol: for jumps, for loads, in data.
_ADDRESS_RELOCATIONS = {"x86_64": (7, 6, 1), "aarch64": (1026, 1025, 257)}.get(platform.machine(), ())
IS_KNOWN = sys.platform == "linux" and bool(_ADDRESS_RELOCATIONS) and platform.libc_ver()[0] == "glibc"
_TARGETS = ("libc.so", "libc-2", "ld-linux", "libpthread", "linux-vdso")  # what is called, and what loads
# Of these alone: that of other libraries would look for names where the caller, not the library, says.
_LOADING = {"dlopen": (b"_cffi_backend",), "dlsym": (b"_cffi_backend", b"/_ctypes.")}
_DYNAMIC, _PROTECTED = 2, 0x6474E552  # PT_DYNAMIC, PT_GNU_RELRO of elf.h
_PLTRELSZ, _STRTAB, _SYMTAB, _RELA, _RELASZ, _STRSZ, _JMPREL, _RELACOUNT = 2, 5, 6, 7, 8, 10, 23, 0x6FFFFFF9
_RELOCATION = np.dtype([("offset", "<u8"), ("info", "<u8"), ("addend", "<i8")])
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("at", "<u8"), ("size", "<u8")]
)


class _Header(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("offset", ctypes.c_uint64), ("at", ctypes.c_uint64),
        ("physical", ctypes.c_uint64), ("file_size", ctypes.c_uint64), ("size", ctypes.c_uint64),
        ("align", ctypes.c_uint64),
    )  # fmt: skip


class _Loaded(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64), ("name", ctypes.c_char_p), ("headers", ctypes.POINTER(_Header)),
        ("number", ctypes.c_uint16),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Slot:
    """A word that holds the address of a function; ``library`` is its library's place and name."""

    library: tuple[int, bytes]
    address: int
    function: str
    is_protected: bool


_known: dict[tuple[int, bytes], list[_Slot]] = {}  # by a library's place and name


@dataclass(frozen=True, slots=True)
class StandIns:
    """Addresses by the names of libc's functions: for libraries, for Python's own modules, and for the interpreter."""

    libraries: Mapping[str, int]
    modules: Mapping[str, int]
    interpreter: Mapping[str, int]

    def of(self, library: bytes) -> Mapping[str, int]:
        """Those for a library of this name, by which it was loaded; the program itself has none."""
        if not library or os.path.basename(library).startswith(b"libpython"):
            return self.interpreter
        return self.modules if b"/lib-dynload/" in library else self.libraries


class Links:
    """The words of all libraries that are loaded, for some functions of libc."""

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._before: dict[int, tuple[_Slot, int]] = {}

    def exchange(self) -> None:
        """Let libraries that were loaded since call the stand-ins."""
        for slot, address in list(_slots(self._stand_ins)):
            now = ctypes.c_uint64.from_address(slot.address).value
            if now != address:
                self._before[slot.address] = slot, now
                _write(slot, address)

    def give_back(self) -> None:
        """Restore the original addresses; may be called repeatedly."""
        loaded = {(base, name) for base, name, _ in _loaded()}
        for slot, before in list(self._before.values()):
            if slot.library in loaded:
                _write(slot, before)
        self._before.clear()


def _write(slot: _Slot, address: int) -> None:
    page = slot.address & -mmap.PAGESIZE
    if slot.is_protected:
        _libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
    ctypes.c_uint64.from_address(slot.address).value = address
    if slot.is_protected:
        _libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ)


def _slots(stand_ins: StandIns) -> Iterator[tuple[_Slot, int]]:
    for base, name, headers in _loaded():
        if os.path.basename(name).startswith(tuple(one.encode() for one in _TARGETS)):
            continue
        addresses = stand_ins.of(name)
        if (base, name) not in _known:
            _known[base, name] = list(_slots_of((base, name), headers, addresses))
        for one in _known[base, name]:
            if any(loading in name for loading in _LOADING.get(one.function, (b"",))):
                yield one, addresses[one.function]


def _loaded() -> list[tuple[int, bytes, list[tuple[int, int, int]]]]:
    found = []

    def note(loaded: Any, size: int, data: Any) -> int:
        one = loaded.contents
        headers = [(one.headers[i].type, one.headers[i].at, one.headers[i].size) for i in range(one.number)]
        found.append((one.base, one.name or b"", headers))
        return 0

    _libc.dl_iterate_phdr(_NOTE(note), None)
    return found


def _slots_of(
    library: tuple[int, bytes], headers: list[tuple[int, int, int]], names: Collection[str]
) -> Iterator[_Slot]:
    base = library[0]
    dynamic = next((base + at for kind, at, _ in headers if kind == _DYNAMIC), None)
    if dynamic is None:
        return
    entries = dict(_entries(dynamic))

    def place(tag: int) -> int:
        return entries[tag] if entries[tag] >= base else base + entries[tag]

    if not {_STRTAB, _STRSZ, _SYMTAB} <= entries.keys():
        return
    strings = ctypes.string_at(place(_STRTAB), entries[_STRSZ])
    protected = [
        (base + at & -mmap.PAGESIZE, base + at + size & -mmap.PAGESIZE) for k, at, size in headers if k == _PROTECTED
    ]
    for start, size, skipped in ((_JMPREL, _PLTRELSZ, 0), (_RELA, _RELASZ, entries.get(_RELACOUNT, 0))):
        if start not in entries:
            continue
        table = _array(place(start), entries[size] // _RELOCATION.itemsize, _RELOCATION)[skipped:]
        kinds = table["info"] & 0xFFFFFFFF
        table = table[np.isin(kinds, _ADDRESS_RELOCATIONS) & (table["addend"] == 0)]
        for number, offset in _undefined(table, place(_SYMTAB)):
            name = strings[number : strings.index(b"\0", number)].decode("ascii", "replace")
            if name in names:
                at = base + offset
                yield _Slot(library, at, name, any(low <= at < high for low, high in protected))


def _undefined(table: Any, symbols: int) -> list[tuple[int, int]]:
    """The names (where they begin) of symbols that are another library's, with the offset of their word."""
    if not len(table):
        return []
    indices = table["info"] >> np.uint64(32)
    every = _array(symbols, int(indices.max()) + 1, _SYMBOL)[indices]
    is_wanted = every["section"] == 0
    return list(zip(every["name"][is_wanted].tolist(), table["offset"][is_wanted].tolist(), strict=True))


def _entries(dynamic: int) -> Iterator[tuple[int, int]]:
    while (tag := ctypes.c_int64.from_address(dynamic).value) != 0:
        yield tag, ctypes.c_uint64.from_address(dynamic + 8).value
        dynamic += 16


def _array(address: int, number: int, dtype: np.dtype[Any]) -> Any:
    memory: Any = (ctypes.c_char * (number * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


_NOTE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Loaded), ctypes.c_size_t, ctypes.c_void_p)
if IS_KNOWN:
    _libc = ctypes.PyDLL(None)  # it keeps Python's lock: the loader's is held while it is asked
    _libc.mprotect.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    _libc.dl_iterate_phdr.argtypes = (_NOTE, ctypes.c_void_p)
