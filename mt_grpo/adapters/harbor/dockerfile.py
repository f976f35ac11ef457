"""What a task's Dockerfile asks of a sandbox: files, folders, variables, and commands that are surely the same here.

Read are FROM a common base, COPY and ADD of files, WORKDIR, ENV, ARG, and RUN of commands in `COMMANDS`, or of
installing what this machine has. What needs more raises `NeedsMore` with the reason. CMD, EXPOSE, LABEL and the like
change nothing for a task.
"""

from __future__ import annotations

import functools
import glob
import itertools
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from mt_grpo.adapters.harbor.archives import TaskArchive
from mt_grpo.adapters.harbor.toml_tables import BrokenTask, NeedsMore, text_of

# Of these, a sandbox has what the machine has: tasks should not depend on the version of a base.
BASES = re.compile(
    r"((docker\.io/|public\.ecr\.aws/docker/|mirror\.gcr\.io/)?library/|docker\.io/)?(debian|ubuntu|python|buildpack-deps|bash|busybox|alpine)(:[\w.\-]+)?(@sha256:\w+)?"
    r"|ghcr\.io/laude-institute/t-bench/(ubuntu|python)[\w.\-]*(:[\w.\-]+)?"
)
# Commands whose work depends on nothing but the files of the task, and on nothing of the network.
COMMANDS = frozenset(
    "mkdir touch chmod chown chgrp cp mv rm rmdir ln echo printf cat true test [ tee sed awk grep sort uniq head tail "
    "cut tr wc seq date find xargs ls tar gzip gunzip unzip zip split base64 md5sum sha256sum cd export set python "
    "python3 bash sh git truncate dd install sleep basename dirname realpath env : useradd groupadd".split()
)
NOT_REALLY = frozenset("useradd groupadd chown chgrp".split())  # a sandbox has one user
SETS = re.compile(r"(?s)\w+=.*")  # a word that sets a variable
APT = re.compile(r"apt(-get)?$")
PIP = re.compile(r"(pip3?|python3? -m pip)$")
SYSTEM_FOLDERS = tuple(
    "/usr /etc /bin /sbin /lib /lib32 /lib64 /libx32 /proc /sys /dev /tests /logs /solution".split()
)
# Folders of Debian, of which nearly all bases are. `COPY file /tmp` puts a file into one, as into any that is there.
BASE_FOLDERS = tuple("root tmp srv home opt var var/tmp var/log var/lib mnt media run boot".split())
CHANGE_NOTHING = frozenset("CMD EXPOSE LABEL MAINTAINER STOPSIGNAL HEALTHCHECK VOLUME".split())
PIP_WITH_VALUE = frozenset(
    "-i --index-url --extra-index-url -f --find-links --timeout --retries --root-user-action".split()
)


@dataclass
class Build:
    """What a rollout's file system begins with.

    Attributes:
        workdir: Where commands begin.
        env: Variables of all commands.
        steps: In order: archives to unpack at the root, and commands with their folder and their variables.
        bash: Whether commands are bash's. Without a SHELL they are those of `sh`.
    """

    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    steps: list[bytes | tuple[str, str, dict[str, str]]] = field(default_factory=list)
    bash: bool = False

    @property
    def runs(self) -> bool:
        """Whether a command is among the steps."""
        return any(isinstance(step, tuple) for step in self.steps)


def instructions_of(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile: (name in capitals, what stands behind it).

    >>> instructions_of("FROM debian\\n# no\\nRUN a \\\\\\n  # nor this\\n  && b\\n")
    [('FROM', 'debian'), ('RUN', 'a && b')]
    """
    found, open_line = [], ""
    for line in text.splitlines():
        if line.strip().startswith("#") or (open_line and not line.strip()):
            if re.match(r"#\s*escape\s*=", line.strip()):
                raise NeedsMore("# escape in the Dockerfile")
            continue
        open_line += line.strip() if not open_line else " " + line.strip()
        if open_line.endswith("\\"):
            open_line = open_line[:-1].rstrip()
            continue
        if open_line.strip():
            name, _, rest = open_line.strip().partition(" ")
            found.append((name.upper(), rest.strip()))
        open_line = ""
    if open_line.strip():
        name, _, rest = open_line.strip().partition(" ")
        found.append((name.upper(), rest.strip()))
    return found


class DockerfileReader:
    """Reads one Dockerfile.

    Args:
        folder: The task's `environment`.
        task: The task's folder, for errors.
    """

    def __init__(self, folder: Path, task: Path):
        self.folder, self.task = folder, task
        self.build, self.args = Build(), {}
        self._archive = TaskArchive()
        self._folders = set(BASE_FOLDERS)  # that are surely there

    def read(self) -> Build:
        """What the Dockerfile builds. Raises `BrokenTask`, `NeedsMore`."""
        if (self.folder / ".dockerignore").exists():
            raise NeedsMore(".dockerignore")
        found = instructions_of(text_of(self.folder / "Dockerfile", self.task))
        for name, rest in found:
            if name not in CHANGE_NOTHING:
                if re.search(r"<<-?[\"']?\w", rest) and name in ("RUN", "COPY", "ADD"):
                    raise NeedsMore(f"{name} with a text in the Dockerfile")
                method = getattr(self, f"_{name.lower()}", None)
                if method is None:
                    raise NeedsMore(f"{name:.20} in the Dockerfile")
                method(rest)
        if sum(name == "FROM" for name, _ in found) != 1:
            if found and any(name == "FROM" for name, _ in found):
                raise NeedsMore("a Dockerfile of several stages")
            raise BrokenTask("environment/Dockerfile has no FROM.")
        self._end_archive()
        return self.build

    def _filled(self, text: str) -> str:
        """A text with its variables filled in."""
        known = {**self.args, **self.build.env}

        def value(match: re.Match) -> str:
            name, default = match[1] or match[2], match[3]
            return known.get(name) or default or known.get(name, "")

        return re.sub(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})", value, text)

    def _from(self, rest: str) -> None:
        words = [word for word in self._filled(rest).split() if not word.startswith("--")]
        if not words or not BASES.fullmatch(words[0]):
            raise NeedsMore(f"FROM {(words or ['nothing'])[0].partition('@')[0]:.60}")
        # Debian's sh is not that of busybox, which is more like bash.
        self.build.bash = re.search(r"alpine|busybox|(^|/)bash(:|@|$)", words[0]) is not None

    def _arg(self, rest: str) -> None:
        name, _, value = rest.partition("=")
        self.args.setdefault(name.strip(), self._filled(value.strip().strip("\"'")))

    def _env(self, rest: str) -> None:
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise BrokenTask(f"environment/Dockerfile: ENV {rest:.60}: {error}.") from None
        if words and "=" not in words[0]:
            name, _, value = rest.partition(" ")
            pairs = [(name, value.strip())]
        else:
            pairs = [tuple(word.partition("=")[::2]) for word in words]
        for name, value in pairs:
            before = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **self.build.env}
            filled = re.sub(r"\$(?:PATH\b|\{PATH\})", before["PATH"], value)
            self.build.env[name] = self._filled(filled)

    def _workdir(self, rest: str) -> None:
        self.build.workdir = self._path(self._filled(rest.strip().strip("\"'")), "WORKDIR")
        self._archive.add_folder(self.build.workdir.lstrip("/"))

    def _user(self, rest: str) -> None:
        if rest.strip().partition(":")[0] not in ("root", "0"):
            raise NeedsMore("USER in the Dockerfile")

    def _shell(self, rest: str) -> None:
        if "bash" not in rest:
            raise NeedsMore("SHELL in the Dockerfile")
        self.build.bash = True

    def _path(self, path: str, what: str) -> str:
        """An absolute path in the sandbox. Raises `NeedsMore` for one of the system's, which nobody may write."""
        whole = PurePosixPath("/") / self.build.workdir / path
        parts: list[str] = []
        for part in whole.parts[1:]:
            parts = parts[:-1] if part == ".." else [*parts, part]
        found = "/" + "/".join(parts)
        for folder in SYSTEM_FOLDERS:
            if found == folder or found.startswith(f"{folder}/"):
                raise NeedsMore(f"{what} to {folder}")
        return found

    def _copy(self, rest: str, what: str = "COPY") -> None:
        rest, mode = self._filled(rest), None
        while match := re.match(r"--(\w+)(?:=(\S+))?\s+", rest):
            if match[1] == "chmod" and re.fullmatch(r"[0-7]{3,4}", match[2] or ""):
                mode = int(match[2], 8)
            elif match[1] != "chown":
                raise NeedsMore(f"{what} --{match[1]} in the Dockerfile")
            rest = rest[match.end() :]
        try:
            words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        except ValueError as error:
            raise BrokenTask(f"environment/Dockerfile: {what} {rest:.60}: {error}.") from None
        if len(words) < 2:
            raise BrokenTask(f"environment/Dockerfile: {what} {rest:.60}, expected what is copied, and to where.")
        *sources, target = words
        found = [each for source in sources for each in self._sources(source, what)]
        into = target.endswith(("/", "/.")) or target == "." or len(found) > 1
        path = self._path(target, what).lstrip("/")
        into = into or path in self._folders or self._archive.is_folder(path)
        for source in found:
            if what == "ADD" and source.suffix in (".tar", ".gz", ".tgz", ".xz", ".bz2"):
                raise NeedsMore("ADD of an archive")
            real = source.resolve()  # Docker copies what a link leads to; those inside of a folder stay links
            if real.is_dir():
                self._archive.add_tree(real, path, mode)
            else:
                self._archive.add_file(f"{path}/{source.name}".lstrip("/") if into else path, real, mode)

    def _add(self, rest: str) -> None:
        if re.search(r"(^|\s)(https?://|git@)", rest):
            raise NeedsMore("ADD from the network")
        self._copy(rest, "ADD")

    def _sources(self, source: str, what: str) -> list[Path]:
        """The files that a pattern names. Raises `BrokenTask` where there are none."""
        base = self.folder.resolve()
        names = glob.glob(source.lstrip("/") or ".", root_dir=base, include_hidden=True)
        found = [base / name for name in sorted(names)]
        if not found:
            raise BrokenTask(f"environment/Dockerfile: {what} {source!r}: there is no such file in environment/.")
        if outside := [each for each in found if not each.resolve().is_relative_to(base)]:
            raise BrokenTask(f"environment/Dockerfile: {what} {source!r} leads out of environment/: {outside[0]}.")
        return found

    def _run(self, rest: str) -> None:
        if rest.startswith("["):
            raise NeedsMore("RUN as a list in the Dockerfile")
        kept = needed_commands(re.sub(r"^(--\S+\s+)+", "", rest))
        if kept:
            self._end_archive()
            for folder in made_folders(kept, self.build.workdir, self._filled):
                self._folders |= {str(each).lstrip("/") for each in (folder, *folder.parents)}
            self.build.steps.append((kept, self.build.workdir, {**self.args, **self.build.env}))

    def _end_archive(self) -> None:
        for name in self._archive.members:
            self._path(f"/{name}", "COPY")
        self._folders.update(name for name in self._archive.members if self._archive.is_folder(name))
        if self._archive.members:
            self.build.steps.append(self._archive.tar())
            self._archive = TaskArchive()


def made_folders(line: str, workdir: str, filled: Callable[[str], str] = str) -> list[PurePosixPath]:
    """The folders that a RUN surely makes by `mkdir` or enters by `cd`.

    >>> [str(each) for each in made_folders("mkdir -p /data/in logs > x && cd /srv/app && mkdir ../x", "/app")]
    ['/data/in', '/app/logs', '/srv/app', '/srv/x']
    >>> [str(each) for each in made_folders("cd /a && mkdir b || true && mkdir c", "/app")]  # b perhaps, and then?
    ['/a']
    """
    found, here = [], PurePosixPath(workdir)
    for command in commands_of(line):
        try:
            name, *words = shlex.split(command)
        except ValueError:  # a quote that another shell would close elsewhere, or nothing
            continue
        if "||" in words or (name == "cd" and words[:1] in ([], ["-"])):
            break
        words = list(itertools.takewhile(lambda word: not re.match(r"\d*[<>|&]", word), words))
        folders = (
            [here / filled(word) for word in words if not word.startswith("-")] if name in ("mkdir", "cd") else []
        )
        found += [PurePosixPath(os.path.normpath(each)) for each in folders]
        here = found[-1] if name == "cd" and folders else here
    return found


def needed_commands(line: str) -> str:
    """The part of a RUN that is to be run here. Installing what the machine has is not.

    Raises `NeedsMore` for a command that is not in `COMMANDS`, and for packages that the machine has not.

    >>> needed_commands("mkdir -p /data && echo 1 > /data/one"), needed_commands("apt-get update && apt-get clean")
    ('mkdir -p /data && echo 1 > /data/one', '')
    >>> needed_commands("N=3; apt-get update; seq $N > /n")  # a variable is of the commands behind it
    'N=3 && seq $N > /n'
    """
    kept = []
    for command in commands_of(line):
        if not command or re.fullmatch(r"set(\s+-\w+)*(\s+pipefail)?", command):
            continue
        try:
            words = shlex.split(command)
        except ValueError:  # a quote that another shell would close elsewhere
            raise NeedsMore("a RUN that cannot be split into commands") from None
        while words and (SETS.fullmatch(words[0]) or words[0] == "sudo"):
            words = words[1:]
        if not words and "=" in command:
            kept.append(command)
        if not words or re.fullmatch(r"rm -rf? (/var/(lib/apt/lists|cache)\S*|/root/\.cache\S*)", " ".join(words)):
            continue
        if APT.match(words[0]):
            check_apt(words)
        elif PIP.match(words[0]) or PIP.match(" ".join(words[:3])):
            check_pip(words)
        elif words[0] not in NOT_REALLY and not is_link_of_system(words):
            kept.append(command)
    while kept and all(SETS.fullmatch(word) for word in shlex.split(kept[-1])):  # no command behind reads them
        kept.pop()
    for command in kept:
        check_words(command)
    return " && ".join(kept)


def commands_of(line: str) -> list[str]:
    """The commands of a line, split at `&&` and `;` outside of quotes.

    >>> commands_of("a 'b && c' && d; e \\\\; f")
    ["a 'b && c'", 'd', 'e \\\\; f']
    """
    commands, quote, begun, at = [], "", 0, 0
    while at < len(line):
        mark = line[at]
        if mark == "\\" and quote != "'":
            at += 1
        elif quote:
            quote = "" if mark == quote else quote
        elif mark in "'\"":
            quote = mark
        elif mark == ";" or line.startswith("&&", at):
            commands.append(line[begun:at].strip())
            at += 0 if mark == ";" else 1
            begun = at + 1
        at += 1
    return [*commands, line[begun:].strip()]


def is_link_of_system(words: list[str]) -> bool:
    """Whether a command makes a link in the system's folders that this machine has. Raises `NeedsMore` for another.

    >>> is_link_of_system(["ln", "-sf", "/bin/bash", "/usr/bin/bash"]), is_link_of_system(["ln", "-s", "a", "/app/b"])
    (True, False)
    """
    paths = [word for word in words[1:] if not word.startswith("-")]
    if words[0] != "ln" or len(paths) != 2 or not is_of_system(paths[1]):
        return False
    if not os.path.exists(paths[1]) or os.path.realpath(paths[0]) != os.path.realpath(paths[1]):
        raise NeedsMore(f"the link {paths[1]:.60} to {paths[0]:.60}")
    return True


def is_of_system(path: str) -> bool:
    """Whether a path is one of the system's folders, or in one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in SYSTEM_FOLDERS)


def substituted(command: str) -> list[str]:
    r"""The first words of the commands whose output a command takes, by `$(...)` or backticks.

    >>> substituted("echo \"it's $(curl x)\" `date` '$(CC)' \\$(no) $((1+2))")
    ['curl', 'date']
    """
    found, quote, ticks, k = [], "", False, 0
    while k < len(command):
        each, begins = command[k], 0
        if quote == "'":
            quote = "" if each == "'" else quote
        elif each == "\\":
            k += 1
        elif each == "'" and not quote:
            quote = each
        elif each == '"':
            quote = "" if quote else each
        elif each == "`":
            ticks, begins = not ticks, 0 if ticks else k + 1
        elif command.startswith("$(", k) and not command.startswith("$((", k):
            begins = k + 2
        word = re.compile(r"\s*([\w./-]+)").match(command, begins) if begins else None
        found += [word[1]] if word else []
        k += 1
    return found


def check_words(command: str) -> None:
    """Raise `NeedsMore` for a command of a pipeline, or one whose output it takes, that is not in `COMMANDS`."""
    for word in substituted(command):
        if word not in COMMANDS:
            raise NeedsMore(f"RUN {PurePosixPath(word).name:.30} in the Dockerfile")
    for part in re.split(r"\|\|?", re.sub(r"'[^']*'|\"[^\"]*\"", "x", command)):
        words = part.split()
        word = next((each for each in words if "=" not in each), "")
        if word.lstrip("({!").strip() and word.lstrip("({!") not in COMMANDS:
            raise NeedsMore(f"RUN {PurePosixPath(word).name:.30} in the Dockerfile")
        if word == "git" and re.search(r"\bgit\s+(clone|fetch|pull|push|submodule)\b", part):
            raise NeedsMore("RUN git clone in the Dockerfile")


def check_apt(words: list[str]) -> None:
    """Raise `NeedsMore` for packages of Debian that this machine has not."""
    if "install" in words:
        for name in [word for word in words[words.index("install") + 1 :] if not word.startswith("-")]:
            if not has_debian_package(name.partition("=")[0]):
                raise NeedsMore(f"the package {name.partition('=')[0]:.40} of Debian")


def check_pip(words: list[str]) -> None:
    """Raise `NeedsMore` for packages of Python that the machine's interpreter has not, in this version."""
    if "install" not in words:
        return
    rest, skip = words[words.index("install") + 1 :], False
    for word in rest:
        if skip or word.startswith("-"):
            if word in ("-r", "--requirement", "-e", "--editable"):
                raise NeedsMore("pip install of a file in the Dockerfile")
            skip = not skip and word in PIP_WITH_VALUE
            continue
        match = re.fullmatch(r"([A-Za-z0-9][\w.\-]*)(\[[^\]]*\])?(?:==([\w.]+)|[<>=!~].*)?", word)
        if not match:
            raise NeedsMore("pip install of a path in the Dockerfile")
        version = python_package(match[1])
        if match[1].lower() in ("pip", "setuptools", "wheel"):
            continue
        if version is None or (match[3] and match[3] != version):
            raise NeedsMore(f"the package {word:.40} of Python")


def has_debian_package(name: str) -> bool:
    """Whether a package of Debian is installed on this machine, or another one that provides it."""
    return name.partition(":")[0] in debian_packages()


@functools.cache
def debian_packages() -> frozenset[str]:
    """The names of what is installed, and of what that provides; none where this is no Debian."""
    try:
        said = "${db:Status-Abbrev}|${Package}, ${Provides}\n"
        found = subprocess.run(["dpkg-query", "-W", "-f", said], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    lines = [line.partition("|")[2] for line in found.stdout.splitlines() if line.startswith("ii")]
    return frozenset(each.split()[0] for line in lines for each in line.split(",") if each.strip())


@functools.cache
def python_package(name: str) -> str | None:
    """The version of a package of the interpreter that sandboxes have, /usr/bin/python3; None: it has none."""
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    try:
        command = ["/usr/bin/python3", "-I", "-c", code, name]
        found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
