// Draws a turn's phases until the first token, one row each, from the comment at the end of a stream (as in Server-Timing).

const MARK = "server-timing ";

/** The request header that asks for the comment. */
export const ASKED = { "X-Upbeat-Timing": "1" };

/** The phases that a stream's comment names, {name, ms, words} each, in their order; none where it names something else. */
export function phases(comment) {
  if (!comment?.startsWith(MARK)) return [];
  const found = comment.slice(MARK.length).matchAll(/([a-z-]+);dur=(\d+(?:\.\d+)?)(?:;desc="([^"]*)")?/g);
  return [...found].map(([, name, ms, words]) => ({ name, ms: Number(ms), words: words ?? name })).filter((phase) => phase.name !== "total");
}

const shown = (ms) => (ms < 10 ? `${ms.toFixed(1)} ms` : ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

/** A folded list of a turn's phases; null: unknown. */
export function waterfall(comment) {
  const all = phases(comment);
  const until = all.filter((phase) => phase.name !== "decode");
  const decoded = all.find((phase) => phase.name === "decode");
  const whole = until.reduce((sum, phase) => sum + phase.ms, 0);
  if (!whole) return null;
  const details = document.createElement("details");
  details.className = "waterfall";
  const summary = document.createElement("summary");
  summary.textContent = `Where the ${shown(whole)} before the first token went` + (decoded ? `; then it decoded for ${shown(decoded.ms)}` : "");
  const list = document.createElement("ol");
  let began = 0;
  for (const { name, ms, words } of until) {
    const item = document.createElement("li");
    item.dataset.phase = name;
    const [label, bar, time] = ["span", "i", "b"].map((tag) => document.createElement(tag));
    label.textContent = words;
    bar.setAttribute("aria-hidden", "true");
    bar.style.setProperty("--start", (began / whole).toFixed(4));
    bar.style.setProperty("--share", (ms / whole).toFixed(4));
    time.textContent = shown(ms);
    item.append(label, " ", bar, time);
    list.append(item);
    began += ms;
  }
  details.append(summary, list);
  return details;
}
