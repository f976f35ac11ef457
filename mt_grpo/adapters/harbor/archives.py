"""Files of a task as archives of tar, which sandboxes unpack. Built of names and contents: nothing is followed."""

from __future__ import annotations

import io
import mmap
import os
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path

from mt_grpo.adapters.harbor.toml_tables import BrokenTask

ARCHIVE_BYTES = 256 * 2**20  # of a folder of a task
ARCHIVE_FILES = 20_000


class TaskArchive:
    """An archive that grows. A later file of a path takes the place of an earlier one."""

    def __init__(self):
        self.members: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
        self._size = 0

    def is_folder(self, path: str) -> bool:
        return path in self.members and self.members[path][0].type == tarfile.DIRTYPE

    def add_folder(self, path: str, mode: int = 0o755) -> None:
        """A folder, and those above it. The path is relative."""
        for above in [*reversed(Path(path).parents), Path(path)]:
            name = above.as_posix()
            if name != "." and name not in self.members:
                info = tarfile.TarInfo(name)
                info.type, info.mode = tarfile.DIRTYPE, mode
                self.members[name] = (info, b"")

    def add_file(self, path: str, source: Path, mode: int | None = None) -> None:
        """A file, or a symbolic link as it is. Raises `BrokenTask` for what is neither."""
        found = os.lstat(source)
        info = tarfile.TarInfo(path)
        content = b""
        if stat.S_ISLNK(found.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(source)
        elif stat.S_ISREG(found.st_mode):
            self._size += found.st_size
            if self._size > ARCHIVE_BYTES:
                raise BrokenTask(f"its files have more than {ARCHIVE_BYTES} bytes.")
            content = source.read_bytes()
            info.size = len(content)
            info.mode = (stat.S_IMODE(found.st_mode) | 0o444) if mode is None else mode
        else:
            raise BrokenTask(f"{source.name} is neither a file nor a folder nor a link.")
        info.mtime = int(found.st_mtime)  # else it is of 1970, which no zip file takes
        self.add_folder(Path(path).parent.as_posix())
        for above in Path(path).parents:
            if (folder := self.members.get(above.as_posix())) is not None:
                folder[0].mtime = max(folder[0].mtime, info.mtime)
        self._check_parents(path)
        if self.is_folder(path):
            raise BrokenTask(f"{path} is a folder, and a file: {source.name}.")
        self.members[path] = (info, content)
        if len(self.members) > ARCHIVE_FILES:
            raise BrokenTask(f"it has more than {ARCHIVE_FILES} files.")

    def _check_parents(self, path: str) -> None:
        """Raise `BrokenTask` for a file beneath a link: it would be written elsewhere."""
        for above in Path(path).parents:
            found = self.members.get(above.as_posix())
            if found is not None and found[0].type != tarfile.DIRTYPE:
                raise BrokenTask(f"{path} stands beneath {above}, which is no folder.")

    def add_tree(self, folder: Path, under: str = "", mode: int | None = None) -> None:
        """What is in a folder, with its names."""
        for source in walk_of(folder):
            path = (Path(under) / source.relative_to(folder)).as_posix()
            if source.is_dir() and not source.is_symlink():
                self.add_folder(path)
            else:
                self.add_file(path, source, mode)
        if under:
            self.add_folder(under)

    def tar(self) -> bytes:
        """The archive."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for name in sorted(self.members):  # a folder stands before what is in it
                info, content = self.members[name]
                tar.addfile(info, io.BytesIO(content))
        return buffer.getvalue()


def walk_of(folder: Path) -> Iterable[Path]:
    """All that is in a folder, in the order of names; links are not followed."""
    for each in sorted(folder.iterdir()):
        yield each
        if each.is_dir() and not each.is_symlink():
            yield from walk_of(each)


def tree_archive(*folders: Path) -> bytes:
    """An archive of what is in these folders, a later one over an earlier one. A missing folder is an empty one."""
    archive = TaskArchive()
    for folder in folders:
        if folder.is_dir():
            archive.add_tree(folder)
    return archive.tar()


def kilobytes_of(archive: bytes) -> int:
    """What a tmpfs needs for the files of an archive: whole pages of memory, and one for each name.

    >>> page = mmap.PAGESIZE // 1024
    >>> kilobytes_of(TaskArchive().tar()) // page
    1
    """
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        pages = 1 + sum(1 + -(-member.size // mmap.PAGESIZE) for member in tar)
    return pages * mmap.PAGESIZE // 1024
