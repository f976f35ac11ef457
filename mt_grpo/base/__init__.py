"""What every wing stands on: nothing here knows of conversations, models or recipes.

errors           errors of a generation server, which any wing may raise or catch
event_loop       one event loop in a background thread
fields           a recipe's key as a field, which says all of it once; intervals of numbers
files            the output directory of one run, streams that outlive their readers, paths, YAML
json_types       whether a value from YAML fits a type; a value as JSON
ranks            errors of one rank, raised on all ranks
rows             rows as they were written, without a table's types
tested_versions  the ranges of versions that were tested, and what is outside of them
"""
