// The progress of a task with several rounds, and the estimated rest, in words.

/** `done` rounds of `of` took `doneMs`, and `ms` have passed since. Nothing is estimated before the first round has ended. */
export function progress(done, of, doneMs, ms) {
  const at = `Round ${done + 1} of ${of}`;
  if (!done) return `${at}; `;
  return `${at}, about ${roughly(((of - done) * doneMs) / done - ms)} left; `;
}

const roughly = (ms) => (ms < 90_000 ? `${5 * Math.max(1, Math.round(ms / 5000))} s` : `${Math.round(ms / 60_000)} min`);
