"""/api/tags, /api/show and /api/version through the real `ollama` client."""

import httpx
import ollama
import pytest

from quire import __version__


def test_the_names_are_listed_with_a_tag_and_can_be_asked_for(plain):
    listed = plain.list().models
    assert [model.model for model in listed] == ["smol:latest", "smol-alias:latest"]
    assert all(len(model.digest) == 64 and model.details.family == "llama" for model in listed)
    assert plain.chat(listed[0].model, [{"role": "user", "content": "Hi"}], options={"num_predict": 2}).done


def test_a_model_says_what_it_can_do(plain, thinker):
    shown = plain.show("smol")
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo["general.architecture"] == "llama" and shown.modelinfo["llama.context_length"] == 512
    assert "im_start" in shown.template and shown.modified_at is not None
    assert thinker.show("smol:latest").capabilities == ["completion", "tools", "thinking"]
    with pytest.raises(ollama.ResponseError, match="not found") as unknown:
        plain.show("../etc")
    assert unknown.value.status_code == 404


def test_the_older_name_of_a_field_works(smol):
    assert httpx.post(smol.url + "/api/show", json={"name": "smol"}).json()["capabilities"]
    assert httpx.post(smol.url + "/api/show", json={}).json() == {"error": "model is missing: send it"}


def test_the_version_is_ours(smol):
    assert httpx.get(smol.url + "/api/version").json() == {"version": __version__}
