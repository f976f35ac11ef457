"""The modules that `mt_grpo_trainer.py` imports. No module of this package imports that script.

A module imports only from modules that stand above it in this list.

    rollout          dataclasses of a conversation: StopReason, ToolCall, Generation, Turn, Rollout
    versions         names of pushed weights: which a server reports, which sampled a turn
    id_hashes        hashes of token ids
    protocols        the interfaces: Environment, ToolFormat, Backend
    tensors          rows of unequal length as tensors; statistics without NaN
    event_loop       one event loop in a background thread
    locks            lock files in places where others may write
    output           the output directory of one run; streams that outlive their readers
    json_types       type hints: those of JSON itself, their names, values from YAML; a value as JSON
    rows             rows as they were written, without a table's types
    data             training and test rows
    settings         recipe keys: types, defaults, ranges
    tool_results     a tool's result or error as text
    tool_arguments   a call's arguments as the types of a tool's parameters
    math_limits      math-verify in threads: without its time limits by signals
    tool_threads     running a tool within its time: event loop, threads
    tool_processes   tools in processes of their own
    control_tokens   control tokens broken in text from tools and data
    chat_format      what tool formats share: the end of a turn, thinking, the ids behind a turn
    hermes           calls as the chat template writes them, several in one turn
    native           the syntaxes of calls of families of models
    formats          the format xml; the choice of a tool format
    tools            a function as a tool: description, argument check
    replies          what an environment says, checked
    environments     one environment per conversation
    sampling         the sampling parameters of a request, and its room
    server_errors    errors of a server; checks of its address and answers
    vllm_server      connection to the server: retries, time limits, proof of the weights' version
    nccl_group       weights sent to one server over NCCL, within a time limit
    weight_transfer  transfer of weights to servers: disk, NCCL
    server_members   which of several servers hold the weights
    routes           conversations over several servers, and what is proven of them
    server_pool      one or several servers as one backend
    shared_folder    whether the server sees the directory of the weights
    in_process       backend that generates in this process, with TRL's own generation
    ranks            errors of one rank raised on all ranks
    weights          iteration over the policy's parameters
    weight_sync      push, check, push again after a restart
    prefetch         running conversations; a later batch of the data, seen early
    progress         one line per log, and what the run is doing
    reward_calls     a reward in the main thread, within a time limit
    reward_errors    where a reward function raised, and for which rollout
    scoring          running reward functions, and checking what they return
    records          rollouts as rows of the loss, in passes
    text_check       a record's text against the chat template's
    token_checks     whether training reads the tokens of inference
    run_log          metrics of rollouts and credit
    log_rows         rollouts as rows of their log
    rollout_log      rows of whole conversations, in segments
    metrics_log      a row per log
    checkpoints      whether a folder is a whole checkpoint
    admission        groups in flight: which of them a step takes
    run_record       what determines the results of a run
    nodes            several nodes: one output directory, one checkpoint to resume, the same settings
    snapshots        the state at the end of a step, for a resumed run
    disk_room        whether the disk has room for what a run saves
    saving           checkpoints and the trained model on disks that may be full
    resume           stop on a signal or an error, save, continue
    ahead            conversations in flight while the policy trains
    off_policy       settings of training on rollouts of other weights
    refusals         settings that are refused before a model is loaded
    preflight        checks that need model, data or server
    readings         what the first rollouts say of a run: the table of troubles
    batch_facts      facts of a recipe and of its first rollouts
    run_plan         what a run will do, as text
    first_batch      the look at the first batch, and --preflight
    watch            warnings of a run in trouble
    recipes          YAML and command line into checked dataclasses
    plugins          files loaded by path
    adapter_keys     recipe keys of the adapters, and the choice of one
"""
