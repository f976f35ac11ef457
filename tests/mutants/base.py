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
    Mutation(
        "pictures: another size is the same picture",
        "mt_grpo/base/pictures.py",
        'size = "{}x{}:".format(*image.size).encode()',
        'size = b""',
        "tests/training/test_images.py::test_an_id_is_of_the_pixels_and_the_size",
    ),
    Mutation(
        "pictures: ids do not keep their picture",
        "mt_grpo/base/pictures.py",
        "        found.picture = self\n",
        "        pass\n",
        "tests/training/test_images.py::test_a_picture_is_known_as_long_as_ids_hold_it",
    ),
    Mutation(
        "pictures: a part of a picture is trained on",
        "mt_grpo/base/pictures.py",
        "if size and len(run) % size and not partial:",
        "if False:",
        "tests/training/test_images.py::test_a_picture_stands_in_a_record_whole_or_not_at_all",
    ),
    Mutation(
        "pictures: TRL's rows get pictures in another order",
        "mt_grpo/base/pictures.py",
        "features_of(sum(rows, [])).items()}",
        "features_of(sum(rows[::-1], [])).items()}",
        "tests/training/test_images.py::test_a_picture_stands_in_a_record_whole_or_not_at_all",
    ),
    Mutation(
        "pictures: two models share a picture",
        "mt_grpo/base/pictures.py",
        "hashlib.blake2b(reader.encode() + size",
        "hashlib.blake2b(size",
        "tests/training/test_images.py::test_another_reader_reads_another_picture",
    ),
    Mutation(
        "pictures: what comes from another rank takes the place of one's own",
        "mt_grpo/base/pictures.py",
        "            if known is None:\n",
        "            if True:\n",
        "tests/training/test_images.py::test_there_is_one_picture_for_an_id",
    ),
    Mutation(
        "a full disk ends the output for ever",
        "mt_grpo/base/files.py",
        "if error.errno in (errno.ENOSPC, errno.EDQUOT):",
        "if False:",
        "tests/scripts/test_scripts.py::test_a_full_disk_costs_lines_and_not_the_output",
    ),
]
