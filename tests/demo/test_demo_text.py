"""The prose of the demo: there, plain, and long enough."""

from importlib.resources import files

from fp8pass.demo import text


def test_chapters_are_prose_without_headings() -> None:
    chapters = text.chapters()
    assert len(chapters) == 8
    for chapter in chapters:
        assert len(chapter.split()) > 1000
        assert chapter.isascii() and "CHAPTER" not in chapter
        assert chapter == chapter.strip()
    assert chapters[0].startswith("No one who had ever seen Catherine Morland in her infancy")


def test_calibration_is_never_measured() -> None:
    assert text.calibration_text() not in text.measured_text()
    assert text.chapters()[0][:200] not in text.measured_text()
    assert text.chapters()[-1] in text.measured_text()


def test_origin_is_stated_beside_the_text() -> None:
    notice = files("fp8pass.demo").joinpath("data", "NOTICE").read_text("utf-8")
    for fact in ("Jane Austen", "public domain", "r-cran-janeaustenr", "chapters 1 to 8"):
        assert fact in " ".join(notice.split())
        assert fact in text.SOURCE or fact == "r-cran-janeaustenr"
