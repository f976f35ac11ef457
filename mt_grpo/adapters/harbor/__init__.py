"""Task folders of Harbor as environments: an instruction, a machine to work on, tests that say what was reached.

keys          what a recipe says of task folders
toml_tables   tables of a task.toml, read with their types
tasks         a task folder, read and checked
dockerfile    what a task's Dockerfile asks of a sandbox
archives      files of a task as archives
users         numbers of users that nobody else has
namespaces    scripts of the root of a sandbox's namespaces
commands      commands of a sandbox as processes, and what comes of them
sandbox       commands in a file system of a rollout's own, without Docker
bubblewrap    the same by bubblewrap, where no namespaces of our own can be made
docker        the same by Docker
images        what a rollout's file system begins with
verdict       what tests say, as rewards
environment   one task per conversation
agents        a program of the user's that works on a task
check         a command that tries the tasks of a folder with their own solutions
"""
