// "Let others speak": other conversations take their turns, so that this one's cache has to make room. They are erased afterwards.

import { story } from "./story.js";

const COUNT = 8;
const AT_A_TIME = 2;
/** A prompt's words at most; and tokens that a word of a story has at most, for models that hold less. */
const WORDS = 1200;
const WORD_TOKENS = 3;

let round = 0;

/** Runs one round; `told` hears how many of how many have spoken. Throws what the server refuses. */
export async function letOthersSpeak(api, model, told) {
  round += 1;
  const name = `others-${Math.random().toString(36).slice(2, 8)}-${round}`;
  const waiting = Array.from({ length: COUNT }, (_, i) => i);
  const spoken = [];
  const words = Math.min(WORDS, Math.floor(model.maxTokens / WORD_TOKENS) - 40);
  told(0, COUNT);
  const speak = async () => {
    for (let i = waiting.shift(); i !== undefined; i = waiting.shift()) {
      const session = `${name}-${i}`;
      spoken.push(session);
      const seed = Math.floor(Math.random() * 2 ** 31);
      await api.json("/v1/chat/completions", {
        method: "POST",
        headers: { "X-Session-Id": session },
        body: { model: model.id, messages: [{ role: "user", content: story(seed, words) }], max_tokens: 4, temperature: 0 },
      });
      told(COUNT - waiting.length, COUNT);
    }
  };
  try {
    await Promise.all(Array.from({ length: AT_A_TIME }, speak));
  } finally {
    // A session whose turn was refused is not known: nothing to erase.
    await Promise.allSettled(spoken.map((session) => api.call(`/v1/sessions/${session}`, { method: "DELETE" })));
  }
}
