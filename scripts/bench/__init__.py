"""The benchmarks, each a program that writes its results and its section of a page of docs/.

What they share is in common.py.
"""
