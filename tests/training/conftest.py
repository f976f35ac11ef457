"""A vision-language model of random weights for the tests of images."""

import pytest
import vision_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return vision_model.save(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def tokenizer(folder):
    return vision_model.reading(folder)
