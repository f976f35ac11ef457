"""Faults of `mt_grpo/base`."""

# Anchors stand as in the code, however long they are.
# ruff: noqa: E501

from mutants.mutation import Mutation

MUTATIONS = [
    Mutation(
        "a lock follows links",
        "mt_grpo/base/files.py",
        "flags | os.O_NOFOLLOW | os.O_NONBLOCK",
        "flags | os.O_NONBLOCK",
        "tests/method/test_client.py::test_an_output_lock_is_an_ordinary_file",
    ),
    Mutation(
        "a lock may be a FIFO",
        "mt_grpo/base/files.py",
        "if not stat.S_ISREG(found.st_mode) or",
        "if",
        "tests/method/test_client.py::test_an_output_lock_is_an_ordinary_file",
    ),
    Mutation(
        "rows without a prompt have no key for it",
        "mt_grpo/base/rows.py",
        'row.get("prompt") or [] for row',
        'row["prompt"] for row',
        "tests/conversation/test_environments.py::test_an_environment_may_bring_the_prompts",
    ),
    Mutation(
        "columns that the first row lacks are dropped",
        "mt_grpo/base/rows.py",
        "self.column_names = list(dict.fromkeys(key for row in self for key in row))",
        "self.column_names = list(self[0])",
        "tests/recipe/test_recipes.py::test_data_that_is_good_in_spite_of_its_looks",
    ),
    Mutation(
        "rows: absent columns are None",
        "mt_grpo/base/rows.py",
        "{name: row[name] for name in self._columns if name in row}",
        "{name: row.get(name) for name in self._columns}",
        "tests/base/test_rows.py::test_rows_are_chosen_as_from_a_data_set",
    ),
    Mutation(
        "rows: every row's nulls count as written",
        "mt_grpo/base/rows.py",
        "self._kind = dict if isinstance(source, Dataset) else WrittenRow",
        "self._kind = WrittenRow",
        "tests/base/test_rows.py::test_nulls_of_files_and_of_tables_in_one_run",
    ),
    Mutation(
        "rows: rewards lack a column that no row of the batch has",
        "mt_grpo/base/rows.py",
        "data.column_names if isinstance(data, Rows) else []",
        "[]",
        "tests/base/test_rows.py::test_a_column_that_no_row_of_a_batch_has_is_none_for_rewards",
    ),
    Mutation(
        "rows: TRL looks for images in empty columns",
        "mt_grpo/base/rows.py",
        "for key, value in row.items() if key not in IMAGE_COLUMNS}",
        "for key, value in row.items()}",
        "tests/base/test_rows.py::test_columns_without_an_image_are_of_no_harm",
    ),
    Mutation(
        "rows: a row is given again",
        "mt_grpo/base/rows.py",
        "        return json.loads(self._text[self._ends[at] : self._ends[at + 1]].decode())",
        "        self.held = getattr(self, 'held', {})\n        return self.held.setdefault(at, json.loads(self._text[self._ends[at] : self._ends[at + 1]].decode()))",
        "tests/base/test_rows.py::test_a_row_is_given_anew_each_time",
    ),
    Mutation(
        "data: an empty text is an image",
        "mt_grpo/base/rows.py",
        "isinstance(value, (list, str)) and",
        "isinstance(value, list) and",
        "tests/base/test_rows.py::test_columns_without_an_image_are_of_no_harm",
    ),
    Mutation(
        "NaN is in every range",
        "mt_grpo/base/fields.py",
        "return low < number < high or at_a_bound",
        "return not (number < low or number > high) or at_a_bound",
        "tests/recipe/test_recipes.py::test_every_number_has_a_range",
    ),
    Mutation(
        "an error of a server begins with its class on every rank",
        "mt_grpo/base/ranks.py",
        "str(error) if isinstance(error, ServerError) else error_line(error), kind",
        "error_line(error), kind",
        "tests/run/test_in_flight.py::test_a_push_that_fails_is_told_with_one_mark_at_the_end",
    ),
    Mutation(
        "every version is a tested one",
        "mt_grpo/base/tested_versions.py",
        "fits = tested.contains(versions[name], prereleases=True)",
        "fits = True",
        "tests/run/test_faults.py::test_versions_that_were_not_tested_are_told_before_weights_are_loaded",
    ),
]
