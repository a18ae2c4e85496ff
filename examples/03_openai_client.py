"""Talks to `gambit serve` with the openai package: an answer, its votes, the best three answers, a stream.

    pip install openai
    gambit serve pawn --port 8000                      # in another terminal; the page is at http://127.0.0.1:8000/
    python examples/03_openai_client.py http://127.0.0.1:8000/v1

Any other client of OpenAI's API works too.
"""

import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=base_url, api_key="none")  # a server without keys takes any
model = client.models.list().data[0].id
question = [{"role": "user", "content": "a = 17; b = 5; c = a * b; d = c - a; d?"}]  # answer: 68

# Any option of the search goes into `gambit`; what OpenAI's format has no field for comes back in it.
reply = client.chat.completions.create(model=model, messages=question, extra_body={"gambit": {"capacity": 16}})
print("answer:", reply.choices[0].message.content)
print("votes:", {vote["answer"]: vote["traces"] for vote in reply.gambit["votes"]})
print("tokens of all traces:", reply.usage.completion_tokens)

# n: the best-voted different answers, as far as there are so many.
replies = client.chat.completions.create(model=model, messages=question, n=3, extra_body={"gambit": {"capacity": 16}})
print("best answers:", [choice.message.content for choice in replies.choices])

# A stream shows the search as reasoning while it runs, and ends with the answer. `:sc` is plain voting.
stream = client.chat.completions.create(
    model=f"{model}:sc", messages=question, stream=True, extra_body={"gambit": {"capacity": 8}}
)
is_answer = False
for chunk in stream:
    delta = chunk.choices[0].delta
    if thought := getattr(delta, "reasoning", None):
        print(thought, end="")
    if delta.content:
        print("" if is_answer else "\n---\n", delta.content, sep="", end="")
        is_answer = True
print()
