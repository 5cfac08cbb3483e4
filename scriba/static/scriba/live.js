/* The live page renews itself: asks for what changes, and puts it in place unless somebody is just using it. */
"use strict";
(() => {
  const box = document.getElementById("scriba-live");
  if (!box) return;
  const every = Number(box.dataset.every) || 3000;
  let failures = 0;

  const isInUse = () => {
    const active = document.activeElement;
    return box.contains(active) && active.matches("input, button, a:focus-visible");
  };

  const say = (text) => {
    const clock = box.querySelector(".scriba-clock");
    if (!clock) return;
    clock.classList.toggle("scriba-stale", Boolean(text));
    clock.title = text;
  };

  const renew = async () => {
    if (document.hidden || isInUse()) return;
    const answer = await fetch(box.dataset.url, { credentials: "same-origin", headers: { "X-Requested-With": "fetch" } });
    if (answer.redirected || answer.status === 403) {
      window.location.reload(); // the session is over: the login page says so
      return;
    }
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const text = await answer.text();
    if (isInUse()) return;
    box.innerHTML = text;
    box.dataset.renewed = String(Number(box.dataset.renewed || 0) + 1);
  };

  const loop = async () => {
    try {
      await renew();
      failures = 0;
    } catch (error) {
      failures += 1;
      say(`This is old: ${error.message}. Trying again.`);
    }
    window.setTimeout(loop, every * Math.min(1 + failures, 10));
  };

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) renew().catch(() => {});
  });
  window.setTimeout(loop, every);
})();
