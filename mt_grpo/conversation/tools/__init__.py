"""Functions as tools.

signature     what the model reads of a tool; a call checked against it
arguments     a tool's parameters as types and as a JSON schema
results       a result or an error as text
threads       running a tool within its time: event loop, threads
processes     tools in processes of their own
"""
