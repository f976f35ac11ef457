"""Functions as tools.

signature     what the model reads of a tool; a call's arguments checked against it
arguments     a call's arguments as the types of a tool's parameters
results       a result or an error as text
threads       running a tool within its time: event loop, threads
processes     tools in processes of their own
"""
