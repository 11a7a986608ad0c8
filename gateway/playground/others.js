// "Let others speak": turns of other conversations that evict this one's cache. They are erased afterwards.

import { story } from "./story.js";

const COUNT = 8;
const AT_A_TIME = 2;

let round = 0;

/**
 * Other conversations speak, COUNT at most. words: of each one's prompt. told(spoken, of) hears how many have; enough(): whether they may stop, asked
 * after each. Throws what the server refuses, or when `signal` ends it.
 */
export async function letOthersSpeak(api, model, words, { told, enough, signal }) {
  round += 1;
  const name = `others-${Math.random().toString(36).slice(2, 8)}-${round}`;
  const spoken = [];
  let ended = 0, stopped = false;
  told(0, COUNT);
  const speak = async () => {
    while (spoken.length < COUNT && !stopped) {
      const session = `${name}-${spoken.length}`;
      spoken.push(session);
      const seed = Math.floor(Math.random() * 2 ** 31);
      await api.json("/v1/chat/completions", {
        method: "POST",
        signal,
        headers: { "X-Session-Id": session },
        body: { model: model.id, messages: [{ role: "user", content: story(seed, words) }], max_tokens: 4, temperature: 0 },
      });
      told(++ended, COUNT);
      stopped ||= await enough();
    }
  };
  try {
    await Promise.all(Array.from({ length: AT_A_TIME }, speak));
  } finally {
    // A session whose turn was refused is unknown: nothing to erase.
    await Promise.allSettled(spoken.map((session) => api.call(`/v1/sessions/${session}`, { method: "DELETE" })));
  }
}
