"""Files as the system calls of a simulated host see them: paths, descriptors, folders."""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from functools import lru_cache
from types import SimpleNamespace

from fairtrial.backends.simulated import proc
from fairtrial.backends.simulated.clock import owner
from fairtrial.backends.simulated.kernel import Inode, Open, Process, fault
from fairtrial.backends.simulated.proc import PROC, process


def absolute(path: str) -> str:
    return _normal(process().cwd, path)


@lru_cache(maxsize=4096)
def _normal(cwd: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(cwd, path))


class _Stat(SimpleNamespace):
    """What a ``stat`` gives."""


def stat_of(inode: Inode) -> _Stat:
    return _Stat(
        st_mode=inode.kind | inode.mode,
        st_ino=inode.number,
        st_dev=1,
        st_uid=0,
        st_size=len(inode.content),
        st_ctime=inode.changed_s,
    )


class Path:
    """``os.path``."""

    join, basename, dirname = posixpath.join, posixpath.basename, posixpath.dirname
    abspath = staticmethod(absolute)
    realpath = staticmethod(absolute)

    @staticmethod
    def exists(path: str) -> bool:
        return absolute(path) in process().host.inodes

    lexists = exists

    @staticmethod
    def isfile(path: str) -> bool:
        found = process().host.inodes.get(absolute(path))
        return found is not None and stat.S_ISREG(found.kind)

    @staticmethod
    def samestat(one: _Stat, other: _Stat) -> bool:
        return bool(one.st_ino == other.st_ino)

    @staticmethod
    def samefile(one: str, other: str) -> bool:
        def real(path: str) -> str:
            return readlink(path) if path.startswith("/proc/") else absolute(path)

        return real(one) == real(other)


def listdir(path: str) -> list[str]:
    host = process().host
    if path == "/proc":
        return [str(pid) for pid in host.processes]
    match = PROC.fullmatch(path)
    if match and match[2] == "fd":
        return list(proc.sockets(proc.of(match[1])))
    if match and match[2] == "task":
        return [str(proc.of(match[1]).pid)]
    return host.names(absolute(path))


def readlink(path: str) -> str:
    match = PROC.fullmatch(path)
    if match and match[2]:
        one = proc.of(match[1])
        if match[2] in ("cwd", "exe"):
            return str(getattr(one, match[2]))
        if match[2] in ("fd/1", "fd/2"):
            return one.log or "/dev/null"
        found = proc.sockets(one).get(match[2].removeprefix("fd/"))
        if found:
            return found
    raise fault(errno.ENOENT, path)


def os_stat(path: str, *, follow_symlinks: bool = True) -> _Stat:
    match = PROC.fullmatch(path)
    if match and not match[2]:
        proc.of(match[1])
        return _Stat(st_uid=0)
    if match and match[2]:
        path = readlink(path)
    return stat_of(process().host.inode(absolute(path)))


def os_open(path: str, flags: int, mode: int = 0o777) -> int:
    me = process()
    path = absolute(path)
    found = me.host.inodes.get(path)
    if found is None:
        if not flags & os.O_CREAT:
            raise me.host.absent(path)
        found = me.host.make(path, stat.S_IFREG | mode)
    elif flags & os.O_EXCL and flags & os.O_CREAT:
        raise fault(errno.EEXIST, path)
    if found.kind == stat.S_IFLNK and flags & os.O_NOFOLLOW:
        raise fault(errno.ELOOP, path)
    if stat.S_ISDIR(found.kind) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        raise fault(errno.EISDIR, path)
    if flags & os.O_DIRECTORY and not stat.S_ISDIR(found.kind):
        raise fault(errno.ENOTDIR, path)
    if flags & os.O_TRUNC:
        found.content.clear()
    fd = next(number for number in range(3, 1 << 16) if number not in me.fds)
    me.fds[fd] = Open(found, path, append=bool(flags & os.O_APPEND))
    return fd


def opened(fd: int) -> Open:
    found = process().fds.get(fd)
    if found is None:
        raise fault(errno.EBADF)
    return found


def write(fd: int, content: bytes) -> int:
    me = process()
    if fd in (1, 2) and fd not in me.fds:
        _say(me, fd, bytes(content))
        return len(content)
    file = opened(fd)
    at = len(file.inode.content) if file.append else file.at
    done = pwrite(fd, content, at)
    file.at = at + done
    return done


def _say(me: Process, fd: int, content: bytes) -> None:
    if me.log is not None:
        inode = me.host.inodes.get(me.log)
        if inode is not None and not me.host.full:
            inode.content += content
        return
    if fd == 1 and me.on_line is not None:
        me.on_line(content)
    elif fd == 1:
        me.stdout += content
    else:
        me.stderr += content


def pwrite(fd: int, content: bytes, at: int) -> int:
    me, file = process(), opened(fd)
    size = len(file.inode.content)
    if me.host.full and at + len(content) > max(size, -(-size // 4096) * 4096):
        raise fault(errno.ENOSPC, file.path)
    if content:
        file.inode.content += bytes(max(0, at - size))
        file.inode.content[at : at + len(content)] = content
        file.inode.changed_s = me.host.clock.utc_s()
    return len(content)


def read(fd: int, size: int) -> bytes:
    me = process()
    if fd == 0:
        assert me.stdin is not None
        while not me.stdin.ready(None):
            pass
        me.check()
        content = bytes(me.stdin.content[:size])
        del me.stdin.content[:size]
        return content
    file = opened(fd)
    content = bytes(file.inode.content[file.at : file.at + size])
    file.at += len(content)
    return content


def close(fd: int) -> None:
    me: Process = owner()
    if me.alive:
        me.host.close(me, fd)


def fsync(fd: int) -> None:
    process()


def fchmod(fd: int, mode: int) -> None:
    _change(opened(fd).inode, mode)


def chmod(path: str, mode: int) -> None:
    _change(process().host.inode(absolute(path)), mode)


def _change(inode: Inode, mode: int | None = None) -> None:
    inode.mode = inode.mode if mode is None else mode
    inode.changed_s = process().host.clock.utc_s()


def _in_folder(path: str) -> None:
    """Raise where the folder of a name is none."""
    host = process().host
    folder = host.inodes.get(posixpath.dirname(path))
    if folder is None or not stat.S_ISDIR(folder.kind):
        raise host.absent(path)


def rename(source: str, target: str) -> None:
    """Of a file: a folder is never renamed."""
    host = process().host
    source, target = absolute(source), absolute(target)
    _in_folder(source)
    _in_folder(target)
    inode, there = host.inode(source), host.inodes.get(target)
    if there is inode:
        return
    if there is not None and stat.S_ISDIR(there.kind):
        raise fault(errno.EISDIR, target)
    del host.inodes[source]
    host.inodes[target] = inode
    _change(inode)


def link(source: str, target: str) -> None:
    host = process().host
    source, target = absolute(source), absolute(target)
    inode = host.inode(source)
    _in_folder(target)
    if target in host.inodes:
        raise fault(errno.EEXIST, target)
    if stat.S_ISDIR(inode.kind):
        raise fault(errno.EPERM, source)
    host.inodes[target] = inode
    _change(inode)


def unlink(path: str) -> None:
    host = process().host
    path = absolute(path)
    inode = host.inode(path)
    if stat.S_ISDIR(inode.kind):
        raise fault(errno.EISDIR, path)
    del host.inodes[path]
    _change(inode)


def mkdir(path: str, mode: int = 0o777) -> None:
    host = process().host
    if absolute(path) in host.inodes:
        raise fault(errno.EEXIST, path)
    host.make(absolute(path), stat.S_IFDIR | mode)


def makedirs(path: str, exist_ok: bool = False) -> None:
    host = process().host
    path = absolute(path)
    found = host.inodes.get(path)
    if found is not None and exist_ok and stat.S_ISDIR(found.kind):
        return
    if posixpath.dirname(path) not in host.inodes:
        makedirs(posixpath.dirname(path), exist_ok=True)
    mkdir(path, 0o755)


def access(path: str, mode: int) -> bool:
    return absolute(path) in process().host.inodes
