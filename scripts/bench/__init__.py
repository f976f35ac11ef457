"""The benchmarks, each a program that writes its results and its section of a page of docs/.

What they share is in common.py. A program puts scripts/ in place of this folder on the path before it imports
libraries: else agents.py would be found as the package `agents` of the OpenAI Agents SDK.
"""
