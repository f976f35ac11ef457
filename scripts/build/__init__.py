"""The programs that made the models and the data of hf_recipes/tiny.

A program puts scripts/ in place of this folder on the path before it imports libraries: else they would find gym.py
and tools.py under these names.
"""
