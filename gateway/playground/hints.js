// The hints of this page: web-sdk on its text box, with a browser token for the session instead of the server's key.

import { attach } from "/upbeat.mjs";

/** When the page sent its last hint, in the page's time. The picture shows a hint a moment later, perhaps after the turn is sent. */
let hintedMs = -Infinity;
const seen = (entries) => {
  for (const entry of entries) if (new URL(entry.name).pathname === "/v1/advisory") hintedMs = Math.max(hintedMs, entry.startTime);
};
const requests = new PerformanceObserver((list) => seen(list.getEntries()));
requests.observe({ type: "resource" });

/** Whether a hint sent at `ms` or later has been answered. */
export function hintedSince(ms) {
  seen(requests.takeRecords());
  return hintedMs >= ms;
}

/** Sends hints for `session` during typing in `selector`. Returns `advise` (hint like a key) and `detach`. */
export function hinting(api, selector, session) {
  const token = async (id) => (await api.json("/v1/client_secrets", { method: "POST", body: { session_id: id } })).value;
  return attach(selector, { session, token });
}
