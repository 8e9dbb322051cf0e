"""Text from peers is printed without control characters, and within the width of the terminal."""

from ftis_node.telemetry.terminal_text import cells, clipped, columns, cut, printable, wrapped


def test_control_characters_are_escaped():
    assert printable("a\x1b[2Jb\r\n\x9b\u202ec\x07") == "a\\x1b[2Jb\\r\\n\\x9b\\u202ec\\x07"
    assert printable("naïve 京 |[red]") == "naïve 京 |[red]"
    assert printable("a\u3164\u115f\u1160\uffa0\u2800\U0001d159") == "a\\u3164\\u115f\\u1160\\uffa0\\u2800\\U0001d159"


def test_widths_are_counted_in_cells():
    assert (cells("京都"), cells("e\u0301"), cells("ab")) == (4, 1, 2)
    assert (clipped("京都市", 5), clipped("abc", 3)) == ("京都…", "abc")
    assert [clipped("abc", width) for width in (1, 2)] == ["…", "a…"]
    assert cells(clipped("\x1b" * 40, 10)) == 10


def test_lines_are_broken_between_words():
    assert wrapped("one two three", 7, indent=2) == ["one two", "  three"]
    assert wrapped("a" + "b" * 20, 8) == ["abbbbbb…"]
    assert all(cells(line) <= 9 for line in wrapped("京都 " * 9, 9, indent=3))


def test_a_text_is_cut_without_loss():
    assert (cut("京都市 abc\n", 4), cut("", 4)) == (["京都", "市 a", "bc\\n"], [""])
    assert cut("\u0301\u0301", 4) == ["\u0301\u0301"]


def test_columns_are_as_wide_as_their_widest_cell():
    assert columns(("A", "BC"), [("京都", "1"), ("x\x1b", "")]) == ["A      BC", "京都   1", "x\\x1b"]
