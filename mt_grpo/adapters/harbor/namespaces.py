"""Scripts of the root of a sandbox's namespaces: they make its files, put tests into it, and read a reward."""

import shlex

# Of a rollout, at its beginning.
FOLDERS = (
    "usr etc proc dev tests solution logs root home opt srv mnt run tmp var logs/agent logs/artifacts logs/verifier "
    "logs/home"
).split()
# The file system of a rollout. Arguments: a folder, MiB, inodes, the owner's number, and folders of the machine that
# are shown at their own paths, and that nobody may write. Behind a line of its stdin
# nothing directly in `/` can be made or replaced: tests must not find what a command put there (`conftest.py`, `bin`).
# INVARIANT: all that must not be moved or replaced by a command is a mount point, in the command's namespace, too.
SET_UP = """
set -eu
mount -n -t tmpfs -o "size=$2m,nr_inodes=$3,mode=1777,nosuid,nodev" tmpfs "$1"
cd "$1"
new=$(pwd -P)
mkdir old usr etc proc dev tests solution logs root home opt srv mnt run tmp var var/tmp var/log
of_system() {
    mount -n --rbind "/$1" "$1"
    mapfile -t mounts < /proc/self/mountinfo
    for each in "${mounts[@]}"; do  # read-only is a mount's own: those beneath it, too
        read -r _ _ _ _ point flags _ <<< "$each"
        printf -v point %b "$point"
        case "$point/" in "$new/$1/"*) mount -n -o "remount,bind,nosuid,nodev,ro${flags#r[ow]}" "$point" ;; esac
    done
}
of_system usr
of_system etc
for name in bin sbin lib lib32 lib64 libx32; do
    if [ -L "/$name" ]; then ln -s "$(readlink "/$name")" "$name"
    elif [ -d "/$name" ]; then mkdir "$name"; of_system "$name"; fi
done
mount -n --rbind /proc proc
mount -n -t tmpfs -o size=1m,mode=755 tmpfs dev
for name in null zero full random urandom; do : > "dev/$name"; mount -n --bind "/dev/$name" "dev/$name"; done
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin
ln -s fd/1 dev/stdout
ln -s fd/2 dev/stderr
mkdir dev/shm
mount -n -t tmpfs -o size=64m,mode=1777,nosuid,nodev tmpfs dev/shm
mount -n -o remount,bind,ro dev
mount -n -t tmpfs -o ro,size=4k,mode=755 tmpfs tests
mount -n -t tmpfs -o ro,size=4k,mode=755 tmpfs solution
mount -n -t tmpfs -o size=16m,mode=755 tmpfs logs
mkdir logs/agent logs/artifacts logs/verifier logs/home
mount -n -t tmpfs -o ro,size=4k,mode=755 tmpfs logs/verifier
mount -n -t tmpfs -o ro,size=4k,mode=755 tmpfs logs/home
chown "$4:$4" root home opt srv mnt run tmp var var/tmp var/log logs/agent logs/artifacts
chmod 1777 tmp var/tmp
for folder in "${@:5}"; do
    path=
    IFS=/ read -r -a parts <<< "${folder#/}"
    for part in "${parts[@]}"; do
        path+=${path:+/}$part
        if [ ! -e "$path" ]; then mkdir "$path"; chown "$4:$4" "$path"; fi
    done
    of_system "$path"
done
if command -v ip > /dev/null; then ip link set lo up; fi  # without it, nothing listens on the loopback
pivot_root . old
cd /
umount -n -l /old
rmdir /old
echo ready
read -r _ || exit 0
declare -A mounted
while read -r _ _ _ _ point _; do printf -v point %b "$point"; mounted[$point]=yes; done < /proc/self/mountinfo
for each in /* /.[!.]*; do
    if [ -L "$each" ] || [ "${mounted[$each]-}" ]; then continue; fi
    if [ -f "$each" ] || [ -d "$each" ]; then mount -n --rbind "$each" "$each"; fi
done
mount -n -o remount,bind,ro /
echo sealed
exec cat > /dev/null
"""
# As the first process of a namespace of processes: everything ends with it. What the command prints is the output.
# What is said on stderr is for the trainer.
PREPARE = "echo 1000 > /proc/self/oom_score_adj 2> /dev/null\nset -e\n"
# INVARIANT: stands before the first thing that the policy has made. Without it, nothing of the policy's has run, and
# what went wrong was the sandbox.
BEGUN = b"begun\n"
BEGIN = f"echo {BEGUN.decode().strip()} >&2\n"
# Of a shell's command: where it ended is said on file 3. `exec` first: what the command starts cannot wait on it.
SHELL = """
exec {state}>&3 3>&-
cd -- "$1" 2> /dev/null || cd -- "$2" || exit 125
trap 'pwd -P >&"$state"' EXIT
eval "$3"
"""
RUN = BEGIN + '"$@" < /dev/null 3>&2 2>&1\nexit $?'
RUN_WITH_INPUT = BEGIN + '"$@" 3>&2 2>&1\nexit $?'
RUN_PROGRAM = BEGIN + '"$@" 2>&1\nexit $?'
RUN_QUIETLY = BEGIN + '"$@" < /dev/null 2> /dev/null\nexit $?'
# Arguments: the folder, its KiB, the owner. The archive is read from stdin, by the namespaces' root. `bind`: else the
# owner of the file system is said anew, by a number that a namespace of users does not have.
FILL = """
folder=$1 size=$2 owner=$3
shift 3
mount -n -t tmpfs -o "size=${size}k,mode=755,nosuid,nodev" tmpfs "$folder"
tar -x -C "$folder" --no-same-owner
mount -n -o remount,bind,ro,nosuid,nodev "$folder"
"""
SOLVE_ALONE = BEGIN + '"$@" < /dev/null 2>&1\nexit $?'
SOLVE = FILL + SOLVE_ALONE
# `$AS_AGENT program`, in tests: the program can neither write a reward, nor read the tests, nor end them. It has the
# folders of tests hidden by empty ones, in a namespace of users where it has no privileges, and a namespace of
# processes. `setsid`: a signal to its own group would else reach the tests. The first process has no other user
# than the program, and more privileges: it cannot be stopped or traced.
AS_AGENT = "/logs/home/as-agent"
# What runs before the program is never found by the PATH of a task, nor does it read its BASH_ENV (`-p`).
HIDE_TESTS = """
set -e
path=$PATH
PATH=/usr/sbin:/usr/bin:/sbin:/bin
for folder in /tests /logs/verifier /logs/home; do mount -n -t tmpfs -o ro,size=4k,mode=755 tmpfs "$folder"; done
cd -- "$PWD" 2> /dev/null || cd /
exec {errors}>&2 2> /dev/null
set +e
setsid setpriv --no-new-privs --bounding-set=-all --inh-caps=-all --securebits=+noroot,+noroot_locked \\
    env -u PYTHONSAFEPATH -u PYTHONNOUSERSITE HOME=/root "PATH=$path" "$@" 2>&"$errors" {errors}>&-
exit $?
"""
NEW_SPACES = "/usr/bin/unshare --user --map-root-user --mount --pid --fork --kill-child --mount-proc"
# A signal that ends this, as that of `timeout`, ends the program, and KILL does so by way of the parent's death.
AS_AGENT_FILE = f"""#!/bin/bash -p
exec {{errors}}>&2 2> /dev/null
trap 'kill -KILL $!; exit 143' TERM INT HUP
/usr/bin/setpriv --pdeathsig KILL {NEW_SPACES} \\
    /bin/bash -p -c {shlex.quote(HIDE_TESTS)} as-agent "$@" <&0 2>&"$errors" {{errors}}>&- &
wait $!
"""
# What tests have written as their reward, for the trainer: a link leads nowhere.
TELL_REWARD = """\
for name in reward.json reward.txt; do
    file=/logs/verifier/$name
    if [ -f "$file" ] && [ ! -L "$file" ]; then
        echo "$name $(stat -c %s "$file")" >&2
        head -c 65536 "$file" | base64 -w 0 >&2
        echo >&2
    fi
done
"""
# INVARIANT: a reward is read from a folder that was empty when the tests began, when every process of theirs is dead.
JUDGE_ALONE = (
    BEGIN
    + """set +e
"$@" < /dev/null 2>&1
code=$?
while kill -s KILL -1 2> /dev/null; do sleep 0.01; done  # until nobody is left
"""
    + TELL_REWARD
    + 'exit "$code"\n'
)
JUDGE = (
    f"""{FILL}
for folder in /logs/verifier /logs/home; do
    mount -n -t tmpfs -o size=16m,mode=755,nosuid,nodev tmpfs "$folder"
    chown "$owner:$owner" "$folder"
done
printf %s {shlex.quote(AS_AGENT_FILE)} > {AS_AGENT}
chmod 755 {AS_AGENT}
"""
    + JUDGE_ALONE
)
# A socket in the namespace of networks in which this runs, which the trainer gets by a socket that an argument names.
# The trainer's own Python runs it, with the machine's files.
LISTEN = """
import fcntl, socket, struct, sys
SET_FLAGS, UP = 0x8914, 0x41
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", UP))
listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
with socket.socket(fileno=int(sys.argv[1])) as trainer:
    socket.send_fds(trainer, [b"."], [listening.fileno()])
"""
