/** The script tag's file: the global `upbeat`, whose gateway is where the file came from. */
import { attach, bind, type Options, type Target } from "./index.js";

const from = document.currentScript as HTMLScriptElement | null;
const url = from?.src ? new URL(from.src).origin : "";

(globalThis as any).upbeat = { attach: (target: Target, options: Options) => attach(target, { url, ...options }), bind };
