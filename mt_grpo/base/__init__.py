"""What every wing stands on: nothing here knows of conversations, models or recipes.

errors           errors of a generation server and of a run, which any wing may raise or catch
event_loop       one event loop in a background thread
fields           a recipe's key as a field, which says all of it once
files            the output directory of one run, JSON, paths, YAML
ranks            errors of one rank, raised on all ranks
rows             rows as they were written, without a table's types; values as JSON
"""
