// The hints of this page: web-sdk on its text box, with a token of the session's own, so that the server's key stays where it is.

import { attach } from "/upbeat.mjs";

/** When the last hint of this page left, in the page's time. The picture tells of a hint a moment later, and a turn may be sent before that. */
let hintedMs = -Infinity;
const seen = (entries) => {
  for (const entry of entries) if (new URL(entry.name).pathname === "/v1/advisory") hintedMs = Math.max(hintedMs, entry.startTime);
};
const requests = new PerformanceObserver((list) => seen(list.getEntries()));
requests.observe({ type: "resource" });

/** Whether a hint that left at `ms` or later has been answered. */
export function hintedSince(ms) {
  seen(requests.takeRecords());
  return hintedMs >= ms;
}

/** Hints for `session` while somebody types in `selector`; what it returns has `advise`, as a key would, and `detach`. */
export function hinting(api, selector, session) {
  const token = async (id) => (await api.json("/v1/client_secrets", { method: "POST", body: { session_id: id } })).value;
  return attach(selector, { session, token });
}
