"""Conversations in the browser: kept, searched, renamed, deleted, exported and imported."""

import json


def test_conversations_survive_a_reload_and_can_be_searched(page):
    page.say("apples are round")
    page.click("New conversation")
    page.say("pears are not")
    page.open()
    titles = page.until(lambda: page.text(".entry .title").split("\n"), "the list")
    assert titles == ["pears are not", "apples are round"]
    page.type("#search", "said: apples")
    page.until(lambda: page.text(".entry .title") == "apples are round", "what was searched for")
    page.click("apples are round")
    page.until(lambda: page.answer() == "You said: apples are round", "the conversation")
    page.type("#search", "nowhere")
    page.until(lambda: "Nothing found." in page.text("#sidebar"), "that there is nothing")


def test_a_reload_comes_back_to_the_same_conversation(page):
    page.say("remember me")
    page.driver.refresh()
    page.until(lambda: page.answer() == "You said: remember me", "the conversation")


def test_an_answer_goes_on_while_another_conversation_is_open(page):
    page.say("slow", wait=False)
    page.until(lambda: "word3" in page.answer(), "some words")
    page.click("New conversation")
    page.until(lambda: page.count(".empty"), "an empty conversation")
    page.click("slow")
    page.until(lambda: "word20 " in page.answer() + " ", "more words")
    page.click("Stop")
    page.until_idle()


def test_deleting_can_be_undone(page):
    page.say("keep me")
    page.click("Delete keep me")
    page.until(lambda: not page.count(".entry"), "an empty list")
    assert page.count(".empty")
    page.click("Undo")
    page.until(lambda: page.text(".entry .title") == "keep me", "the conversation")


def test_renaming(page):
    page.say("hello")
    page.click("Rename hello")
    page.type("#title", "A better name")
    page.click("Rename", "dialog")
    page.until(lambda: page.text(".entry .title") == "A better name", "the name")


def test_what_was_exported_can_be_imported(page, downloads):
    page.say("take me along")
    page.click("Regenerate")
    page.until_idle()
    page.click("Export all conversations")
    file = page.until(lambda: next(downloads.glob("conversations-*.json"), None), "the file")
    page.until(lambda: file.stat().st_size, "its text")
    page.click("Delete take me along")
    page.until(lambda: not page.count(".entry"), "an empty list")
    page.find("#sidebar input[type=file]").send_keys(str(file))
    page.until(lambda: "One conversation was imported." in page.text("#notices"), "the import")
    page.click("take me along")
    page.until(lambda: page.answer() == "You said: take me along", "the conversation")
    assert page.text(".assistant .branches") == "2/2"


def node(role="user", parent=None, **fields):
    return {"role": role, "parent": parent, "content": "x", **fields}


def damaged() -> dict[str, tuple[object, str]]:
    def file(*conversations):
        return {"format": "quire-conversations", "version": 1, "conversations": list(conversations)}

    return {
        "other.json": ({"messages": []}, "holds no conversations"),
        "role.json": (file({"nodes": {"a": node("system")}}), "no known role"),
        "text.json": (file({"nodes": {"a": node(content=5)}}), "no text"),
        "parent.json": (file({"nodes": {"a": node(parent="b")}}), "not there"),
        "circle.json": (file({"nodes": {"a": node(parent="b"), "b": node(parent="a")}}), "circle"),
        "many.json": (file(*[{"nodes": {}}] * 2001), "more than 2000"),
    }


def test_files_that_are_damaged_are_refused_with_a_reason(page, tmp_path):
    for name, (content, reason) in damaged().items():
        (tmp_path / name).write_text(json.dumps(content))
        page.find("#sidebar input[type=file]").send_keys(str(tmp_path / name))
        page.until(lambda reason=reason: reason in page.text("#notices"), reason)
    (tmp_path / "broken.json").write_text("{")
    page.find("#sidebar input[type=file]").send_keys(str(tmp_path / "broken.json"))
    page.until(lambda: "not JSON" in page.text("#notices"), "a refusal")
    (tmp_path / "large.json").write_bytes(b" " * ((32 << 20) + 1))
    page.find("#sidebar input[type=file]").send_keys(str(tmp_path / "large.json"))
    page.until(lambda: "larger than 32 MB" in page.text("#notices"), "a refusal")
    assert not page.count(".entry")


def test_an_imported_conversation_cannot_bring_markup_or_fields_of_its_own(page, tmp_path):
    evil = node("assistant", content="<img src=x onerror=hacked=1>", __proto__=1, run={"a": 1}, files="no")
    nodes = {"a": node(content="<b>hi</b>", files=[{"name": "<i>", "text": 5}]), "b": evil | {"parent": "a"}}
    conversations = [
        {"title": "<script>", "nodes": nodes, "leaf": "b", "params": {"values": {"temperature": 7, "nonsense": "1"}}}
    ]
    (tmp_path / "evil.json").write_text(
        json.dumps({"format": "quire-conversations", "version": 1, "conversations": conversations})
    )
    page.find("#sidebar input[type=file]").send_keys(str(tmp_path / "evil.json"))
    page.click("<script>")
    page.until(lambda: page.answer() == "<img src=x onerror=hacked=1>", "the conversation")
    assert page.text(".bubble .text") == "<b>hi</b>"
    assert page.js("return window.hacked === undefined && !document.querySelector('main img, main b')")


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted(page):
    page.say("slow", wait=False)
    page.until(lambda: "word3" in page.answer(), "some words")
    page.click("Delete slow")
    page.until(lambda: not page.count(".entry") and page.count(".empty"), "an empty list")
    page.driver.refresh()
    page.until(lambda: "kept here" in page.text("#sidebar"), "an empty list")
