"""Faults of `mt_grpo/adapters/mcp`."""

# Anchors stand as in the code, however long they are.
# ruff: noqa: E501

from mutants.mutation import Mutation

MUTATIONS = [
    Mutation(
        "results of MCP servers are as long as they like",
        "mt_grpo/adapters/mcp/keys.py",
        "lambda text: cut_characters(text, most, side)",
        "lambda text: text",
        "tests/adapters/test_houses.py::test_results_of_mcp_are_cut_as_those_of_verl",
    ),
    Mutation(
        "mcp: an address without a type is of the newer transport alone",
        "mt_grpo/adapters/mcp/servers.py",
        '["http", "sse"]',
        '["http"]',
        "tests/adapters/test_mcp.py::test_a_server_of_the_older_transport",
    ),
    Mutation(
        "mcp: a server that died is not started again",
        "mt_grpo/adapters/mcp/servers.py",
        "            if self.owner is owner:  # else",
        "            if False:  # else",
        "tests/adapters/test_mcp.py::test_a_server_that_dies_is_started_again",
    ),
    Mutation(
        "mcp: an error of a tool is a result",
        "mt_grpo/adapters/mcp/tools.py",
        "        if result.is_error:\n            raise McpToolError(text)",
        "",
        "tests/adapters/test_mcp.py::test_the_time_server",
    ),
    Mutation(
        "mcp: any number of calls at the same time",
        "mt_grpo/adapters/mcp/servers.py",
        "asyncio.Semaphore(concurrency)",
        "asyncio.Semaphore(999)",
        "tests/adapters/test_mcp.py::test_limits_of_calls",
    ),
    Mutation(
        "mcp: any number of calls per second",
        "mt_grpo/adapters/mcp/servers.py",
        "1 / (rate_limit or 1e9)",
        "1e-9",
        "tests/adapters/test_mcp.py::test_limits_of_calls",
    ),
    Mutation(
        "mcp: a selection takes all",
        "mt_grpo/adapters/mcp/tools.py",
        "if selection is not None and tool.name not in selection and",
        "if False and",
        "tests/adapters/test_mcp.py::test_the_git_server",
    ),
    Mutation(
        "mcp: two tools of one name",
        "mt_grpo/adapters/mcp/tools.py",
        "        if tool.name in chosen:",
        "        if False:",
        "tests/adapters/test_mcp.py::test_names_of_tools",
    ),
    Mutation(
        "mcp: a server outlives the trainer's end",
        "mt_grpo/adapters/mcp/servers.py",
        "closing = [server.close() for server in servers_to_close]",
        "closing = []",
        "tests/adapters/test_mcp.py::test_the_time_server",
    ),
    Mutation(
        "mcp: a start is given up with its call",
        "mt_grpo/adapters/mcp/servers.py",
        "asyncio.wait_for(asyncio.shield(self.ready), max",
        "asyncio.wait_for(self.ready, max",
        "tests/adapters/test_mcp.py::test_a_start_goes_on_where_its_call_is_given_up",
    ),
    Mutation(
        "mcp: variables that are not set",
        "mt_grpo/adapters/mcp/files.py",
        '        if ":-" in (found[1] or ""):',
        "        if True:",
        "tests/adapters/test_mcp.py::test_variables_must_be_set",
    ),
    Mutation(
        "mcp: each page of a list has a time of its own, and the list has none",
        "mt_grpo/adapters/mcp/servers.py",
        "async with asyncio.timeout(self.start_timeout):",
        "async with asyncio.timeout(None):",
        "tests/adapters/test_mcp.py::test_a_list_of_tools_has_one_time_for_all_its_pages",
    ),
    Mutation(
        "tools that a file leaves out are offered",
        "mt_grpo/adapters/mcp/tools.py",
        'if tool.name not in entry["without"] and',
        "if",
        "tests/adapters/test_mcp.py::test_a_file_of_vs_code_starts_its_server",
    ),
    Mutation(
        "an argument's variables are the shell's alone",
        "mt_grpo/adapters/mcp/files.py",
        'fill(str(each), f"{where}: args", own)',
        "str(each)",
        "tests/adapters/test_mcp.py::test_files_of_other_clients_are_read",
    ),
    Mutation(
        "mcp: a server that dies at its start has no exit code",
        "mt_grpo/adapters/mcp/servers.py",
        'getattr(process, "returncode", None)',
        "None",
        "tests/adapters/test_mcp.py::test_a_bad_file_is_refused",
    ),
    Mutation(
        "mcp: images are named to a model that reads them",
        "mt_grpo/adapters/mcp/tools.py",
        "    if not any(images):\n        return None\n",
        "    return None\n",
        "tests/adapters/test_mcp.py::test_images_are_read_where_the_model_reads_images",
    ),
    Mutation(
        "mcp: an image of a resource is not read",
        "mt_grpo/adapters/mcp/tools.py",
        'if blob is not None and str(kind).startswith("image/") else None',
        "if False else None",
        "tests/adapters/test_mcp.py::test_images_are_read_where_the_model_reads_images",
    ),
    Mutation(
        "mcp: any resource is an image",
        "mt_grpo/adapters/mcp/tools.py",
        'blob is not None and str(kind).startswith("image/")',
        "blob is not None",
        "tests/adapters/test_mcp.py::test_images_are_read_where_the_model_reads_images",
    ),
    Mutation(
        "mcp: texts and images are not apart",
        "mt_grpo/adapters/mcp/tools.py",
        '["\\n"] * (k > 0) + [',
        "[",
        "tests/adapters/test_mcp.py::test_images_are_read_where_the_model_reads_images",
    ),
]
