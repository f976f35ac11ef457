"""An environment with every kind of reply: it goes on in the turn's words, answers, stops, and fails."""


class EveryReply:
    """What it replies is what the policy asked for; a turn is worth its length."""

    def reset(self, question, **row):
        self.turns = 0
        return [{"role": "user", "content": f"{question} Ask."}]

    def respond(self, rollout, turn):
        self.turns += 1
        if "fail" in turn.text:
            raise ValueError("as it was asked")
        replies = {
            "go on": {"continuation": " So"},
            "more": {"messages": [{"role": "user", "content": "More of it?"}]},
            "forget": {"history": rollout.history[:1]},
            "stop": {"stop": True},
        }
        reply = next((reply for asked, reply in replies.items() if asked in turn.text), {})
        return {**reply, "reward": len(turn.text) / 10 if reply else None}

    def get_reward(self):
        return self.turns / 4


ENVIRONMENT = EveryReply
