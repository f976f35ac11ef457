"""Functions as tools.

signature     what the model reads of a tool; a call checked against it
running       running a tool within its time: on the event loop or in a thread; a result or an error as text
"""
