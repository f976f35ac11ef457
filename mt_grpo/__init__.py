"""What the method in `mt_grpo_trainer.py` stands on. Nothing in here imports that script.

The rooms, from the ground up. A room imports only from rooms above its own line in this list (tests/test_layout.py).

    rollout          the nouns: StopReason, ToolCall, Generation, Turn, Rollout
    tensors          rows of unequal length as tensors; statistics without NaN
    event_loop       one event loop in a background thread
    locks            lock files in places where others may write
    output           the output directory of one run; streams that outlive their readers
    json_types       which values from JSON or YAML fit a type hint
    settings         recipe keys: types, defaults, ranges
    tool_results     a tool's result or error as text
    tool_threads     running a tool within its time: event loop, threads
    tool_processes   tools in processes of their own
    chat_format      what tool formats share: the end of a turn, thinking, the ids behind a turn
    hermes           calls as the chat template writes them, several in one turn
    native           the syntaxes of calls of families of models
    formats          how a model writes calls and answers: xml; the choice of a format
    control_tokens   text that can neither open nor close a turn
    tools            a function as a tool: description, argument check
    sampling         what a request may say about sampling
    server_errors    what can be wrong with a server's address and answers
    vllm_server      connection to the server: retries, time limits, proof of the weights' version
    weight_transfer  the way of weights to the server: disk, NCCL
    in_process       TRL's own generation behind the backend protocol
    ranks            how ranks stop together
    weights          the walk over the policy's parameters
    weight_sync      push, proof, restart
    prefetch         conversations on their way; the next batch's ahead of its time
    scoring          running reward functions, and checking what they return
    run_log          metrics of rollouts and credit; the rollout log
    checkpoints      which folders are whole checkpoints
    run_record       what decides the numbers of a run
    snapshots        the moment from which a run can be resumed
    disk_room        whether what a run saves has room
    saving           checkpoints and the trained model on disks that may be full
    resume           signals, ranks that stop together, going on
    refusals         what is refused before a model is loaded, and why
    data             rows
    preflight        checks that need model, data or server
    recipes          YAML and command line to checked dataclasses
    plugins          files loaded by path
"""
