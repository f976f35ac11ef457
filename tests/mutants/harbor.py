"""Faults of `mt_grpo/adapters/harbor`."""

# Anchors stand as in the code, however long they are.
# ruff: noqa: E501

from mutants.mutation import Mutation

SANDBOX, ENVIRONMENT = "mt_grpo/adapters/harbor/sandbox.py", "mt_grpo/adapters/harbor/environment.py"
COMMANDS = "mt_grpo/adapters/harbor/commands.py"
SCRIPTS, IMAGES = "mt_grpo/adapters/harbor/namespaces.py", "mt_grpo/adapters/harbor/images.py"
TASKS, DOCKERFILE = "mt_grpo/adapters/harbor/tasks.py", "mt_grpo/adapters/harbor/dockerfile.py"
TESTS, DOCKER_TESTS = "tests/adapters/test_harbor.py", "tests/adapters/test_harbor_docker_faults.py"

MUTATIONS = [
    # No fault lets a sandbox write the programs of the machine: what a test tries in it would reach this machine.
    Mutation(
        "harbor: the folder of the tests is a plain one",
        SCRIPTS,
        "mount -n -t tmpfs -o ro,size=4k,mode=755 tmpfs tests\n",
        "",
        f"{TESTS}::test_what_the_tests_stand_on_cannot_be_replaced",
    ),
    Mutation(
        "harbor: commands have a network",
        SANDBOX,
        'spaces = ["--mount", "--net", "--ipc", "--uts"]',
        'spaces = ["--mount", "--ipc", "--uts"]',
        f"{TESTS}::test_a_sandbox_shows_nothing_of_the_machine_but_its_programs",
    ),
    Mutation(
        "harbor: without root, commands keep the namespace's privileges",
        SANDBOX,
        'who = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "setpriv"]',
        'who = ["setpriv"]',
        f"{TESTS}::test_a_sandbox_shows_nothing_of_the_machine_but_its_programs",
    ),
    Mutation(
        "harbor: a reward may be a link",
        SCRIPTS,
        'if [ -f "$file" ] && [ ! -L "$file" ]; then',
        'if [ -f "$file" ]; then',
        f"{TESTS}::test_tests_without_a_reward_give_nothing_and_are_told_once",
    ),
    Mutation(
        "harbor: a file of a high number cannot be waited for",
        COMMANDS,
        "with selectors.DefaultSelector() as waiting:  # `select` knows no file beyond the first 1,024",
        "with selectors.SelectSelector() as waiting:",
        f"{TESTS}::test_a_trainer_with_many_open_files_runs_commands",
    ),
    Mutation(
        "harbor: a closed sandbox keeps its user",
        SANDBOX,
        "            pipe.close()\n        self._give_back()\n",
        "            pipe.close()\n",
        f"{TESTS}::test_a_closed_sandbox_gives_its_user_back",
    ),
    Mutation(
        "harbor: python of the tests reads the policy's home",
        IMAGES,
        '"PYTHONNOUSERSITE": "1"',
        '"PYTHONNOUSERSIT": "1"',
        f"{TESTS}::test_python_of_the_tests_imports_nothing_of_the_policys_home",
    ),
    Mutation(
        "harbor: a lost sandbox is the policy's fault",
        ENVIRONMENT,
        "            self._failure = error  # `respond` raises it: no fault of the policy's\n",
        "",
        f"{TESTS}::test_a_sandbox_that_is_lost_is_no_fault_of_the_policys",
    ),
    Mutation(
        "harbor: a step's reward is the task's alone",
        ENVIRONMENT,
        "reward = said.reward(self.reward_name) if step.name else None",
        "reward = None",
        f"{TESTS}::test_each_steps_tests_are_its_turns_reward",
    ),
    Mutation(
        "harbor: a missed step is followed by the next",
        ENVIRONMENT,
        "if goes_on and not said.misses(step.min_reward, self.reward_name):",
        "if goes_on:",
        f"{TESTS}::test_a_step_that_is_missed_ends_the_task_and_the_others_count_as_nothing",
    ),
    Mutation(
        "harbor: steps that were not reached do not count",
        "mt_grpo/adapters/harbor/verdict.py",
        "return sum(rewards) / num_steps",
        "return sum(rewards) / len(rewards)",
        f"{TESTS}::test_a_step_that_is_missed_ends_the_task_and_the_others_count_as_nothing",
    ),
    Mutation(
        "harbor: a program of the policy's is in the tests' namespaces",
        SCRIPTS,
        "for folder in /tests /logs/verifier /logs/home; do mount",
        "for folder in /tests /logs/home; do mount",
        f"{TESTS}::test_a_program_of_the_policys_that_tests_start_cannot_judge_itself",
    ),
    Mutation(
        "harbor: a program of the policy's is in the tests' group of processes",
        SCRIPTS,
        "setsid setpriv --no-new-privs",
        "setpriv --no-new-privs",
        f"{TESTS}::test_a_program_of_the_policys_that_tests_start_cannot_judge_itself",
    ),
    Mutation(
        "harbor: a program of the policy's outlives who started it",
        SCRIPTS,
        "/usr/bin/setpriv --pdeathsig KILL {NEW_SPACES}",
        "{NEW_SPACES}",
        f"{TESTS}::test_a_program_of_the_policys_that_tests_start_cannot_judge_itself",
    ),
    Mutation(
        "harbor: programs before the policy's are found by the task's PATH",
        SCRIPTS,
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin\nfor",
        "for",
        f"{TESTS}::test_a_program_of_the_policys_that_tests_start_cannot_judge_itself",
    ),
    Mutation(
        "harbor: a container without a process to spare has an error",
        "mt_grpo/adapters/harbor/docker.py",
        'for words in (kill, ["restart", "--time", "0", self._container]):',
        "for words in (kill,):",
        f"{DOCKER_TESTS}::test_a_container_that_can_start_no_process_is_started_anew_before_it_is_judged",
    ),
    Mutation(
        "harbor: a container that cannot begin is an error",
        "mt_grpo/adapters/harbor/docker.py",
        "            docker_answers()\n            return unable(outcome.why_not_begun())",
        "            raise SandboxError(outcome.why_not_begun())",
        f"{DOCKER_TESTS}::test_a_container_that_can_start_no_process_is_started_anew_before_it_is_judged",
    ),
    Mutation(
        "harbor: what Docker cannot do is the policy's fault",
        "mt_grpo/adapters/harbor/docker.py",
        '    docker_command("version", "--format", "{{.Server.Version}}")\n\n\ndef unable',
        "    pass\n\n\ndef unable",
        f"{DOCKER_TESTS}::test_a_container_that_cannot_be_judged_has_no_reward_while_docker_answers",
    ),
    Mutation(
        "harbor: a call that was given up runs beside the tests",
        SANDBOX,
        "archive, first=first, alone=True)",
        "archive, first=first)",
        f"{TESTS}::test_tests_run_alone",
    ),
    # The test's own namespace of mounts is all that it could write to.
    Mutation(
        "harbor: what is mounted in the system's folders can be written",
        SCRIPTS,
        'case "$point/" in "$new/$1/"*)',
        'case "$point" in "$new/$1")',
        f"{TESTS}::test_what_is_mounted_within_the_systems_folders_cannot_be_written",
    ),
    Mutation(
        "harbor: what a signal ended has said something",
        ENVIRONMENT,
        "    if outcome.code is None or outcome.code > SIGNALLED:",
        "    if False:",
        f"{TESTS}::test_tests_without_a_reward_give_nothing_and_are_told_once",
    ),
    Mutation(
        "harbor: files of tests have no room of whole pages",
        "mt_grpo/adapters/harbor/archives.py",
        "pages = 1 + sum(1 + -(-member.size // mmap.PAGESIZE) for member in tar)",
        "pages = 1 + len(archive) // mmap.PAGESIZE",
        f"{TESTS}::test_tests_of_many_small_files_have_room",
    ),
    Mutation(
        "harbor: tests that could not begin have said nothing",
        SANDBOX,
        "        if outcome.began is None:\n            raise",
        "        if False:\n            raise",
        f"{TESTS}::test_tests_that_cannot_begin_are_an_error_of_the_sandbox",
    ),
    Mutation(
        "harbor: the root is not sealed",
        IMAGES,
        "            sandbox.seal()\n",
        "",
        f"{TESTS}::test_what_stands_in_the_root_cannot_be_replaced",
    ),
    Mutation(
        "harbor: what says something beside the output has no time limit",
        COMMANDS,
        "            if not ready or time.monotonic() > deadline:",
        "            if not ready:  #",
        f"{TESTS}::test_what_has_always_more_to_say_has_a_time_limit",
    ),
    Mutation(
        "harbor: python of the tests imports from the working directory",
        IMAGES,
        '"PYTHONSAFEPATH": "1"',
        '"PYTHONSAFEPAT": "1"',
        f"{TESTS}::test_tests_begin_in_a_home_of_their_own_and_import_nothing_of_the_working_directory",
    ),
    Mutation(
        "harbor: a step that cannot begin is an error",
        ENVIRONMENT,
        "            except NotUnpacked as error:",
        "            except BrokenTask as error:",
        f"{TESTS}::test_a_step_that_the_policy_keeps_from_beginning_is_missed",
    ),
    Mutation(
        "harbor: the next step's files have a time limit of their own",
        ENVIRONMENT,
        "len(self.said), deadline - time.monotonic())",
        "len(self.said), self.verifier_seconds)",
        f"{TESTS}::test_the_tests_of_a_step_and_the_files_of_the_next_have_one_time_limit",
    ),
    Mutation(
        "harbor: a least reward is of the name reward",
        "mt_grpo/adapters/harbor/verdict.py",
        "(not self.rewards or self.reward(name) < least)",
        '(self.rewards.get("reward", 0.0) < least)',
        f"{TESTS}::test_which_of_several_rewards_counts",
    ),
    Mutation(
        "harbor: commands have no time together",
        ENVIRONMENT,
        "self._spent += outcome.seconds",
        "self._spent += 0.0",
        f"{TESTS}::test_the_tasks_time_is_that_of_its_commands",
    ),
    Mutation(
        "harbor: tests that took too long have said something",
        ENVIRONMENT,
        '    if outcome.why:\n        why = f"they took longer',
        '    if False:\n        why = f"they took longer',
        f"{TESTS}::test_tests_without_a_reward_give_nothing_and_are_told_once",
    ),
    Mutation(
        "harbor: a task without tests is read",
        TASKS,
        '        check_tests(folder, folder / "tests")\n        instruction',
        "        instruction",
        f"{TESTS}::test_a_broken_task_is_named_with_its_row",
    ),
    Mutation(
        "harbor: tests that fetch are run without a network",
        TASKS,
        "        if match := FETCHES.search(line):",
        "        if False:",
        f"{TESTS}::test_what_needs_more_is_left_out_and_counted",
    ),
    Mutation(
        "harbor: a variable of the machine is read as its name",
        "mt_grpo/adapters/harbor/toml_tables.py",
        'if asked := re.search(r"\\$\\{(\\w+)\\}", value):',
        "if asked := None:",
        f"{TESTS}::test_what_needs_more_is_left_out_and_counted",
    ),
    Mutation(
        "harbor: a pattern of a Dockerfile leads out of its folder",
        DOCKERFILE,
        "if outside := [each for each in found if not each.resolve().is_relative_to(base)]:",
        "if outside := []:",
        f"{TESTS}::test_a_broken_task_is_named_with_its_row",
    ),
    Mutation(
        "harbor: files beneath a link are written where it leads",
        "mt_grpo/adapters/harbor/archives.py",
        "        self._check_parents(path)\n",
        "",
        f"{TESTS}::test_links_of_a_task_are_kept_and_lead_nowhere_here",
    ),
]
