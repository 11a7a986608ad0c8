// Long text, so that the conversation's cache is worth moving. Its facts are of the kind that the bundled model was trained to recall.

const NAMES = "Ada Boris Clara Daniel Elena Felix Grace Hugo Iris Jonas Kate Leo Maya Nora Oscar Petra Rosa Simon Tara Victor".split(" ");
const PLACES = "Athens Berlin Dublin Geneva Helsinki Kyoto Lisbon Madrid Nairobi Oslo Prague Quito Rome Seoul Tokyo Vienna".split(" ");
const SUBJECTS = "rivers mountains trains bread coffee ships birds trees clouds stars maps bridges islands castles forests storms caves whales".split(" ");
const REMARKS = [
  "They are older than most people think.",
  "There is a lot to learn about them, and it starts with looking closely.",
  "They change slowly, but they never stay the same.",
  "Some are small and some are very large.",
  "They are best enjoyed with time and good company.",
];
/** The question at a story's end. */
export const QUESTION = "What is the code of the garage?";
/** Length in words of the text that measures the model's tokens per word. */
const SAMPLE_WORDS = 300;

/** Numbers from 0 to 1, the same for the same seed (a linear congruential generator). */
function drawing(seed) {
  let state = seed >>> 0;
  return () => (state = (Math.imul(state, 1664525) + 1013904223) >>> 0) / 2 ** 32;
}

/** At most `words` words where these are some fifty, different for every seed from the first words on, ending with a fact, some talk, and a question about the fact: how far back small
 * models remember is not what this page shows. */
export function story(seed, words) {
  const next = drawing(seed * 7919 + 17);
  const pick = (list) => list[Math.floor(next() * list.length)];
  const code = () => String(1000 + Math.floor(next() * 9000));
  const told = [`${pick(NAMES)} from ${pick(PLACES)} and ${pick(NAMES)} from ${pick(PLACES)} like ${pick(SUBJECTS)} and ${pick(SUBJECTS)}.`];
  const talk = () => `Let us talk about ${pick(SUBJECTS)} in ${pick(PLACES)}. ${pick(REMARKS)} ${pick(REMARKS)}`;
  const length = (text) => text.split(" ").length;
  const end = [`The code of the garage is ${code()}.`, talk(), QUESTION].join(" ");
  for (let count = length(told[0]) + length(end), sentence; (count += length((sentence = talk()))) <= words; ) told.push(sentence);
  return [...told, end].join(" ");
}

/** The model's tokens per word of a story, as the server counts them. Throws on refusal. */
export async function wordTokens(api, model) {
  const session = `sample-${crypto.randomUUID()}`;
  const messages = [{ role: "user", content: story(1, SAMPLE_WORDS) }];
  const body = { model: model.id, messages, max_tokens: 1, temperature: 0 };
  const answer = await api.json("/v1/chat/completions", { method: "POST", headers: { "X-Session-Id": session }, body });
  await api.call(`/v1/sessions/${session}`, { method: "DELETE" }).catch(() => {});
  return answer.usage.prompt_tokens / messages[0].content.split(" ").length;
}
