/** What must compile, and what must not; `tests/browser/test_web_sdk_build.py` has it checked against the built types. */
import { attach, bind, type Handle } from "upbeat-web";
import { useUpbeat } from "upbeat-web/react";

const handle: Handle = attach("#prompt", { session: "a" });
handle.advise();
handle.bind("new-1", "chat-1");
handle.detach();
bind("new-1", "chat-1");
attach(document.body, { session: () => null, token: async (session: string) => session, focus: true, url: "", model: "m" });
attach(() => document.querySelector("textarea"), { session: undefined, token: "ek_" });
useUpbeat({ session: "a" }).current?.setSelectionRange(0, 0);
useUpbeat<HTMLInputElement>({ session: "a", target: "#prompt" }).current?.checked;

// @ts-expect-error a session is needed
attach("#prompt", { token: "ek_" });
// @ts-expect-error ids are texts
attach("#prompt", { session: 7 });
// @ts-expect-error nothing else is taken, least of all what was typed
attach("#prompt", { session: "a", text: "typed" });
// @ts-expect-error both ids are needed
bind("new-1");
// @ts-expect-error a textarea by default
useUpbeat({ session: "a" }).current?.checked;
