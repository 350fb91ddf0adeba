"""Rows from files: each form, and each mistake with its place."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from areal.recipes.data.rows import read_rows, split_rows

ROWS = [{"prompt": "é 1", "answer": "1"}, {"prompt": "2", "answer": "2"}, {"prompt": "3", "answer": "3"}]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path


def test_forms_have_the_same_rows_and_fingerprint(tmp_path: Path) -> None:
    lines = written(tmp_path / "rows.jsonl", ROWS)
    whole = tmp_path / "rows.json"
    whole.write_text(json.dumps(ROWS), encoding="utf-8")
    (tmp_path / "mine.py").write_text(
        "import json\ndef rows():\n    return json.load(open(__file__[:-7] + 'rows.json'))\n"
    )
    sources = [str(lines), whole, ROWS, f"{tmp_path}/mine.py:rows"]
    assert [list(read_rows(source)) for source in sources] == [ROWS] * 4
    assert len({read_rows(source).fingerprint() for source in sources}) == 1
    assert read_rows(ROWS[::-1]).fingerprint() != read_rows(ROWS).fingerprint()
    assert read_rows(lines).place(1) == f"{lines}:2"
    assert read_rows(ROWS).place(1) == "list, row 1"


def test_fingerprints_of_pictures_and_arrays_are_those_of_their_contents() -> None:
    def of(value: Any) -> str:
        return read_rows([{"image": value}]).fingerprint()

    picture, other = Image.new("RGB", (4, 3)), Image.new("RGB", (4, 3), "red")
    assert of(picture) == of(picture.copy()) != of(other)
    numbers = np.arange(5000)
    assert of(numbers) == of(numbers.copy()) != of(numbers[::-1])
    assert of(torch.arange(5000)) == of(numbers)


def test_parquet_and_saved_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra recipes is not installed")
    made = datasets.Dataset.from_list(ROWS)
    made.to_parquet(str(tmp_path / "rows.parquet"))
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=made, test=made.select([2])).save_to_disk(str(tmp_path / "two"))
    for source in (tmp_path / "rows.parquet", str(tmp_path / "one"), f"{tmp_path}/two:train", made):
        assert list(read_rows(source)) == ROWS
        assert read_rows(source).fingerprint() == read_rows(ROWS).fingerprint()
    assert list(read_rows(f"{tmp_path}/two:test")) == ROWS[2:]
    # A table has every key in every row: those that were not there are null.
    calls = {"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g", "arguments": {"b": [None]}}}
    uneven = [{"id": 1, "messages": [{"role": "assistant", "tool_calls": [call]}]} for call in calls] + [{"id": 2}]
    table = datasets.Dataset.from_list(uneven)
    table.to_parquet(str(tmp_path / "uneven.parquet"))
    for source in (table, tmp_path / "uneven.parquet"):
        assert list(read_rows(source)) == uneven
        assert read_rows(source).fingerprint() == read_rows(uneven).fingerprint()
    with pytest.raises(ValueError, match=r"has the splits test, train: name one, such as '.*two:test'"):
        read_rows(str(tmp_path / "two"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a\.jsonl:2: .*: '\{\"a\":'"),
        ("a.jsonl", '{"a": 1}\n\n[1]\n', r"a\.jsonl:3: expected an object such as \{\.\.\.\}, not a list"),
        ("a.jsonl", "\n", r"a\.jsonl has no rows"),
        ("a.json", '{"a": 1}', r"a\.json: expected a list of objects; for one object per line, name the file \.jsonl"),
        ("a.json", "[1", r"a\.json: "),
        ("a.csv", "a,b", r"expected a file that ends with \.jsonl, \.json, \.parquet"),
    ],
)
def test_mistakes_in_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rows(str(tmp_path / name))


def test_other_mistakes(tmp_path: Path) -> None:
    written(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"there is no such file: did you mean '.*/train\.jsonl'\?"):
        read_rows(str(tmp_path / "trian.jsonl"))
    with pytest.raises(ValueError, match="pass a sequence of rows, such as a list, or where they are"):
        read_rows(iter(ROWS))
    with pytest.raises(ValueError, match="row 0: a row is a mapping of columns, and this is a str"):
        read_rows(["a"])


def test_renamed_columns_and_held_out_rows() -> None:
    rows = read_rows([{"problem": str(i), "prompt": "other", "x": i} for i in range(10)])
    assert rows.renamed({"prompt": "problem"})[3] == {"prompt": "3", "x": 3}
    with pytest.raises(
        ValueError, match=r"columns: list, row 0 has no column 'probelm', but .*: did you mean 'problem'\?"
    ):
        rows.renamed({"prompt": "probelm"})
    train, held_out = split_rows(rows, 3, seed=0)
    assert sorted(row["x"] for row in (*train, *held_out)) == list(range(10))
    assert len(held_out) == 3
    assert [row["x"] for row in split_rows(rows, 3, seed=0)[1]] == [row["x"] for row in held_out]
    assert [row["x"] for row in split_rows(rows, 3, seed=1)[1]] != [row["x"] for row in held_out]
    with pytest.raises(ValueError, match="held_out = 10: list has 10 rows"):
        split_rows(rows, 10, seed=0)


def test_place_of_a_held_out_row_is_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", [{"number": i + 1} for i in range(6)])
    for part in split_rows(read_rows(path), 2, seed=3):
        assert [part.place(i) for i in range(len(part))] == [f"{path}:{row['number']}" for row in part]
