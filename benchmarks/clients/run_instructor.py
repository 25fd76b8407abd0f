"""Drives instructor, which makes pydantic objects of answers, in each of its ways to ask for one. See `clients.py`."""

import asyncio
from typing import Any, Literal

import driver
import instructor
import openai
from driver import Server, Setting, check, expect
from instructor import Mode
from pydantic import BaseModel, Field


class Address(BaseModel):
    street: str = Field(max_length=20)
    number: int = Field(ge=1, le=999)


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    kind: Literal["adult", "child"]
    addresses: list[Address] = Field(max_length=2)


class User(BaseModel):
    name: str
    age: int


PERSON = [{"role": "user", "content": "Anna is 36 years old and lives at Long Street 5. Who is she?"}]
USER = [{"role": "user", "content": "Extract: Jason is 25 years old."}]


def client(server: Server, mode: Mode, kind: type = openai.OpenAI) -> Any:
    connection = kind(base_url=server.base_url, api_key=server.api_key, max_retries=0, timeout=120)
    wrap = instructor.from_openai
    return wrap(connection, mode=mode, model=server.model, temperature=0, max_tokens=200)


def add_checks(mode: Mode) -> None:
    """What works alike in every mode in which the server holds the answer to the schema."""

    @check(f"{mode.name}: a nested model")
    def create(setting: Setting) -> None:
        person, answer = client(setting.long, mode).create_with_completion(response_model=Person, messages=PERSON)
        expect(isinstance(person, Person) and answer.usage.completion_tokens > 0, answer)

    @check(f"{mode.name}: asynchronous, four at once, without a key")
    def at_once(setting: Setting) -> None:
        async def ask() -> list[Person]:
            asking = client(setting.short, mode, openai.AsyncOpenAI)
            return await asyncio.gather(*(asking.create(response_model=Person, messages=PERSON) for _ in range(4)))

        people = asyncio.run(ask())
        expect(all(isinstance(person, Person) for person in people), people)

    @check(f"{mode.name}: parts of a model while it is written")
    def partial(setting: Setting) -> None:
        parts = list(client(setting.long, mode).create_partial(response_model=Person, messages=PERSON))
        expect(len(parts) > 3 and parts[-1].age is not None, parts[-1:])


for mode in (Mode.JSON_SCHEMA, Mode.TOOLS, Mode.TOOLS_STRICT):
    add_checks(mode)


@check("JSON: a model that the prompt describes")
def json_mode(setting: Setting) -> None:
    user = client(setting.long, Mode.JSON).create(response_model=User, messages=USER, max_retries=3)
    expect((user.name, user.age) == ("Jason", 25), user)


@check("TOOLS: several objects, one after the other")
def several(setting: Setting) -> None:
    users = list(client(setting.long, Mode.TOOLS).create_iterable(response_model=User, messages=USER, max_tokens=400))
    expect(all(isinstance(user, User) for user in users), users)


@check("TOOLS: an answer that is refused is asked for again")
def retries(setting: Setting) -> None:
    seen: list[str] = []

    class Picky(User):
        def model_post_init(self, context: object) -> None:
            seen.append(self.name)
            if len(seen) == 1:
                raise ValueError("say it again")

    user = client(setting.long, Mode.TOOLS).create(response_model=Picky, messages=USER, max_retries=2)
    expect(len(seen) == 2 and isinstance(user, Picky), seen)


driver.main("instructor")
