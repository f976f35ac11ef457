"""Faults of what all adapters share."""

# Anchors stand as in the code, however long they are.
# ruff: noqa: E501

from mutants.mutation import Mutation

MUTATIONS = [
    Mutation(
        "the last reason to end a rollout of a program counts",
        "mt_grpo/adapters/session.py",
        "self.stop_reason = self.stop_reason or reason",
        "self.stop_reason = reason",
        "tests/adapters/test_houses.py::test_the_first_reason_to_end_a_rollout_counts",
    ),
    Mutation(
        "agents: what stands behind a stop text is kept",
        "mt_grpo/adapters/session.py",
        "if not self._ends(ids):",
        "if True:",
        "tests/adapters/test_agents.py::test_what_the_api_says_of_an_answer",
    ),
    Mutation(
        "plug-ins: an unknown import waits for a rollout",
        "mt_grpo/adapters/plugin_imports.py",
        "    if unknown:\n",
        "    if False:\n",
        "tests/adapters/test_ms_swift_plugins.py::test_an_unknown_import_inside_a_function_is_refused_and_not_in_the_middle_of_a_rollout",
    ),
    Mutation(
        "plug-ins: an import that the file tries is refused",
        "mt_grpo/adapters/plugin_imports.py",
        "if isinstance(node, ast.Try) and any(may_catch(handler.type) for handler in node.handlers):",
        "if False:",
        "tests/adapters/test_ms_swift_plugins.py::test_an_import_that_the_plugin_itself_tries_is_its_own_affair",
    ),
    Mutation(
        "plug-ins: what is not offered is not told",
        "mt_grpo/adapters/plugin_imports.py",
        "    if placeholders:\n",
        "    if False:\n",
        "tests/adapters/test_ms_swift_plugins.py::test_what_is_not_offered_is_told_when_the_file_is_loaded_and_raises_where_it_is_used",
    ),
    Mutation(
        "plug-ins: what is imported where a try went well is not looked at",
        "mt_grpo/adapters/plugin_imports.py",
        "parts = [*node.handlers, *node.orelse, *node.finalbody]",
        "parts = node.handlers",
        "tests/adapters/test_ms_swift_plugins.py::test_all_imports_of_a_file_are_found_but_for_those_that_it_tries",
    ),
    Mutation(
        "agents: requests at the same time overrun the budget",
        "mt_grpo/adapters/session.py",
        "if len(turn.token_ids) <= left:",
        "if True:",
        "tests/adapters/test_agents.py::test_requests_at_the_same_time_share_the_token_budget "
        "tests/adapters/test_ms_swift.py::test_requests_at_the_same_time_share_the_budget",
    ),
    Mutation(
        "agents: of n answers the limit of calls counts one",
        "mt_grpo/adapters/session.py",
        "if self._num_calls + count > self.env.max_model_calls:",
        "if self._num_calls >= self.env.max_model_calls:",
        "tests/adapters/test_agents.py::test_n_answers_within_the_limit_of_calls",
    ),
    Mutation(
        "agents: logprobs go on behind the budget",
        "mt_grpo/adapters/session.py",
        "turn.logprobs and turn.logprobs[:left]",
        "turn.logprobs",
        "tests/adapters/test_agents.py::test_requests_at_the_same_time_share_the_token_budget",
    ),
    Mutation(
        "verl: left and right change places",
        "mt_grpo/adapters/house.py",
        '    if side == "left":',
        '    if side == "right":',
        "tests/adapters/test_verl.py::test_function_tools",
    ),
    Mutation(
        "houses: a key that has no effect is taken",
        "mt_grpo/adapters/choose.py",
        "        house.check(script_args, runner)",
        "        pass",
        "tests/adapters/test_houses.py::test_a_new_house_is_its_keys_and_its_place_in_the_list",
    ),
    Mutation(
        "gym: what was thought is an action",
        "mt_grpo/adapters/acting.py",
        "behind_thinking(turn.text)",
        "turn.text",
        "tests/adapters/test_gym.py::test_what_was_thought_is_no_action",
    ),
    Mutation(
        "gym: unclosed thinking is an action",
        "mt_grpo/adapters/acting.py",
        '    if turn.open_thinking:\n        return ""\n',
        "",
        "tests/adapters/test_gym.py::test_what_was_thought_is_no_action",
    ),
    Mutation(
        "gym: an answer hides the action",
        "mt_grpo/adapters/acting.py",
        "turn.answer is None or (CLOSE in behind and CLOSE not in turn.answer)",
        "turn.answer is None",
        "tests/adapters/test_gym.py::test_an_action_beside_an_answer_counts",
    ),
    Mutation(
        "gym: the first action counts",
        "mt_grpo/adapters/acting.py",
        "before, closed, _ = text.rpartition(CLOSE)",
        "before, closed, _ = text.partition(CLOSE)",
        "tests/adapters/test_gym.py::test_what_was_thought_is_no_action",
    ),
    Mutation(
        "prefixes: a text is taken up behind its last special token",
        "mt_grpo/adapters/prefixes.py",
        "start, place = known.starts[number - 1], known.places[number - 1]",
        "start, place = known.ends[number - 1], known.places[number - 1] + 1",
        "tests/adapters/test_prefixes.py::test_ids_are_those_of_the_whole_text",
    ),
    Mutation(
        "prefixes: a special token that only one of two texts has is shared",
        "mt_grpo/adapters/prefixes.py",
        "bisect.bisect_right(known.ends,",
        "bisect.bisect_right(known.starts,",
        "tests/adapters/test_prefixes.py::test_ids_are_those_of_the_whole_text",
    ),
    Mutation(
        "prefixes: unknown characters are special tokens",
        "mt_grpo/adapters/prefixes.py",
        " if token != tokenizer.unk_token}",
        "}",
        "tests/adapters/test_prefixes.py::test_ids_are_those_of_the_whole_text",
    ),
    Mutation(
        "prefixes: a tokenizer is not tried",
        "mt_grpo/adapters/prefixes.py",
        "            if id(self.tokenizer) not in tried:",
        "            if False:",
        "tests/adapters/test_prefixes.py::test_a_tokenizer_that_looks_behind_its_special_tokens_is_found_out",
    ),
    Mutation(
        "prefixes: each text is tokenised whole",
        "mt_grpo/adapters/prefixes.py",
        "        self.kept.append(found)\n",
        "",
        "tests/adapters/test_prefixes.py::test_a_beginning_is_tokenised_once",
    ),
    Mutation(
        "prefixes: who gets a list changes it for others",
        "mt_grpo/adapters/prefixes.py",
        "return list(found.ids)",
        "return found.ids",
        "tests/adapters/test_prefixes.py::test_a_beginning_is_tokenised_once",
    ),
]
