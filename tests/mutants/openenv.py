"""Faults of environments behind OpenEnv's servers."""

# Anchors stand as in the code, however long they are.
# ruff: noqa: E501

from mutants.mutation import Mutation

TESTS = "tests/adapters/test_openenv_servers.py"
ENVIRONMENT, SERVER, TEXT, LOAD = (
    f"mt_grpo/adapters/openenv/{name}.py" for name in ("environment", "server", "text", "load")
)

MUTATIONS = [
    Mutation(
        "openenv: who stops waiting stops the request",
        ENVIRONMENT,
        "return await asyncio.shield(task)",
        "return await task",
        f"{TESTS}::test_a_call_that_is_given_up_counts_and_answers_no_other_one",
    ),
    Mutation(
        "openenv: a call that was given up is not waited for",
        ENVIRONMENT,
        "        while self._running:\n",
        "        while False:\n",
        f"{TESTS}::test_a_call_that_is_given_up_counts_and_answers_no_other_one",
    ),
    Mutation(
        "openenv: calls go on behind the end of the episode",
        ENVIRONMENT,
        "            if self.episode_done:\n                raise CallFailed",
        "            if False:\n                raise CallFailed",
        f"{TESTS}::test_a_call_behind_the_end_of_the_episode_is_not_made",
    ),
    Mutation(
        "openenv: a lost server is the error of a tool",
        ENVIRONMENT,
        "                self._failure = error\n",
        "",
        f"{TESTS}::test_a_call_that_loses_the_server_is_no_error_of_a_tool",
    ),
    Mutation(
        "openenv: no reward is a reward of 0",
        ENVIRONMENT,
        "return sum(rewards) if rewards else None",
        "return sum(rewards)",
        f"{TESTS}::test_an_episode_by_hand",
    ),
    Mutation(
        "openenv: of a turn's calls the last one has the reward",
        ENVIRONMENT,
        "return sum(rewards) if rewards else None",
        "return rewards[-1] if rewards else None",
        f"{TESTS}::test_tools_of_the_server_are_the_models",
    ),
    Mutation(
        "openenv: leaving costs nothing in the last turn",
        ENVIRONMENT,
        "return self.unfinished_reward if last and not self.episode_done else 0.0",
        "return 0.0",
        f"{TESTS}::test_an_episode_that_the_policy_left",
    ),
    Mutation(
        "openenv: leaving costs nothing in the outcome",
        ENVIRONMENT,
        "return scored + (0.0 if self.episode_done else self.unfinished_reward)",
        "return scored",
        f"{TESTS}::test_an_episode_that_the_policy_left",
    ),
    Mutation(
        "openenv: a turn that was cut off is a step",
        ENVIRONMENT,
        'if turn.finish_reason == "length":',
        "if False:",
        f"{TESTS}::test_an_episode_that_the_policy_left",
    ),
    Mutation(
        "openenv: what was thought is sent",
        ENVIRONMENT,
        "self.text.action(said(turn))",
        "self.text.action(turn.text)",
        f"{TESTS}::test_an_episode_by_hand",
    ),
    Mutation(
        "openenv: the recipe's arguments go before the row's",
        ENVIRONMENT,
        "{**defaults, **(given or {}), **columns}",
        "{**(given or {}), **columns, **defaults}",
        f"{TESTS}::test_a_rows_columns_are_arguments_of_reset",
    ),
    Mutation(
        "openenv: a session stays open behind its conversation",
        ENVIRONMENT,
        '        """End the session: another conversation may wait for its place."""\n        await on_openenv_loop(self._end())\n',
        '        """End the session: another conversation may wait for its place."""\n',
        f"{TESTS}::test_the_key_bounds_the_sessions",
    ),
    Mutation(
        "openenv: a full server is not asked again",
        ENVIRONMENT,
        "                if loop.time() > deadline:\n",
        "                if True:\n",
        f"{TESTS}::test_a_place_that_another_run_holds_is_waited_for",
    ),
    Mutation(
        "openenv: an episode that is over at reset is played",
        ENVIRONMENT,
        "        if step.done:\n            raise OpenEnvFailure",
        "        if False:\n            raise OpenEnvFailure",
        f"{TESTS}::test_a_reset_that_begins_nothing",
    ),
    Mutation(
        "openenv: a policy is rid of a rollout whose environment raises",
        SERVER,
        'if code == "EXECUTION_ERROR" and kind == "step":',
        "if False:",
        f"{TESTS}::test_a_step_that_raises_is_an_error_that_the_policy_reads",
    ),
    Mutation(
        "openenv: a server of one place has as many conversations as one of three",
        SERVER,
        "(len(server.sessions) + server.opening) / server.places",
        "len(server.sessions) + server.opening",
        f"{TESTS}::test_conversations_go_where_the_largest_share_is_free",
    ),
    Mutation(
        "openenv: a larger server is asked for an equal share alone",
        LOAD,
        "        if not roomy:\n            break\n        most +=",
        "        break\n        most +=",
        f"{TESTS}::test_a_larger_server_is_asked_for_the_places_that_a_smaller_one_lacks",
    ),
    Mutation(
        "openenv: a server without room is not passed over",
        ENVIRONMENT,
        "                if to_ask:\n                    continue\n",
        "",
        f"{TESTS}::test_a_server_without_room_is_passed_over",
    ),
    Mutation(
        "openenv: an action that does not fit is the server's failure",
        SERVER,
        'if code == "VALIDATION_ERROR" and kind == "step":',
        "if False:",
        f"{TESTS}::test_an_action_that_the_server_refuses_moves_nothing",
    ),
    Mutation(
        "openenv: half of a character is sent",
        SERVER,
        "json.dumps(action, ensure_ascii=False).encode()",
        "json.dumps(action)",
        f"{TESTS}::test_what_no_server_reads_is_no_failure_of_the_server",
    ),
    Mutation(
        "openenv: any text is the end",
        SERVER,
        "if not isinstance(done, bool):",
        "if False:",
        f"{TESTS}::test_nonsense_ends_its_rollout",
    ),
    Mutation(
        "openenv: any reward is taken",
        SERVER,
        "if reward is not None and not is_number(reward):",
        "if False:",
        f"{TESTS}::test_nonsense_ends_its_rollout",
    ),
    Mutation(
        "openenv: an answer to another request is taken",
        SERVER,
        'or answer.get("type") not in (ANSWERS[kind], "error")',
        "or False",
        f"{TESTS}::test_nonsense_ends_its_rollout",
    ),
    Mutation(
        "openenv: two requests at the same time",
        SERVER,
        "        self._order = asyncio.Lock()\n",
        "        self._order = asyncio.Semaphore(9)\n",
        f"{TESTS}::test_a_session_that_is_asked_twice_at_once_answers_in_order",
    ),
    Mutation(
        "openenv: an error of a tool is a result",
        TEXT,
        'if error := observation.get("error"):',
        'if error := observation.get("errors"):',
        f"{TESTS}::test_errors_of_tools_are_errors",
    ),
    Mutation(
        "openenv: images that are not read are text",
        TEXT,
        "return IMAGE.sub(NOT_SHOWN, text)",
        "return text",
        f"{TESTS}::test_images_are_parts_or_are_named",
    ),
    Mutation(
        "openenv: the start is silent of servers with few sessions",
        LOAD,
        "    if places < min(conversations, conversations if most is None else most * len(servers)):\n",
        "    if False:\n",
        f"{TESTS}::test_a_server_of_one_session_plays_conversations_one_after_another",
    ),
    Mutation(
        "openenv: sessions of the start stay open",
        LOAD,
        "await asyncio.gather(*[session.close() for session in list(sessions)])",
        "pass",
        f"{TESTS}::test_the_start_leaves_no_session_open",
    ),
    Mutation(
        "openenv: a tool of the trainer's name hides a method",
        LOAD,
        "hasattr(CallingEnvironment(), tool_name)",
        "False",
        f"{TESTS}::test_tools_that_no_model_could_call",
    ),
    Mutation(
        "openenv: a server of 0.1 is none of OpenEnv's",
        LOAD.replace("load", "server"),
        "if status == 404:",
        "if False:",
        f"{TESTS}::test_what_is_no_server_of_openenv",
    ),
]
