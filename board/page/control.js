'use strict';
// Steering: each order is confirmed, sent with the token of the page's address, and answered.
const Steer = (() => {
  const $ = id => document.getElementById(id);
  let token = '', control = {allowed: false}, order = null;

  function button(text, act) {
    const b = document.createElement('button');
    b.type = 'button';
    b.textContent = text;
    b.addEventListener('click', act);
    return b;
  }

  function say(text) { $('answer').textContent = text; }

  // confirm asks before anything is sent.
  function confirm(question, path, body) {
    order = {path, body};
    $('confirm-text').textContent = question;
    $('confirm-why').value = '';
    $('confirm-who').value = localStorage.getItem('who') || '';
    $('confirm').showModal();
  }

  async function send() {
    $('confirm').close();
    const {path, body} = order, who = $('confirm-who').value.trim();
    localStorage.setItem('who', who);
    say('sent; waiting for the end of the step');
    try {
      const run = 'api/v1/runs/' + Board.shown() + '/';
      let answer = await fetch(run + path, {method: 'POST',
        headers: {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + token},
        body: JSON.stringify({who: who || 'a person', why: $('confirm-why').value, ...body})});
      let told = await answer.json();
      while (answer.ok && told.state === 'pending') { // a long step: ask what has come of the order
        say('pending: the step takes long, and the order waits for its end');
        await new Promise(next => setTimeout(next, 1000));
        answer = await fetch(run + 'orders/' + told.id);
        told = await answer.json();
      }
      say(answer.ok && told.done ? 'done' : 'refused: ' + told.error);
    } catch (e) { say('the board cannot be reached, so it is not known what has come of the order'); }
  }

  // seed offers what may become of a seed.
  function seed(run, at, seed, layer) {
    const form = $('steer');
    form.hidden = !token || !control.allowed || !run.status.state || run.status.state !== 'running';
    if (form.hidden) return;
    const key = at.layer + '/' + at.seed + '/' + seed.stage;
    if (form.dataset.key === key) return; // or a choice would be lost
    form.dataset.key = key;
    const name = seed.place || layer.name + ', seed ' + at.seed;
    const command = c => ({commands: [{layer: at.layer, seed: at.seed, ...c}]});
    const items = [];
    if (seed.stage === 'Dormant') items.push(...germination(at, seed, layer, name, command));
    else for (const to of seed.next || []) {
      items.push(button('Move to ' + to, () => confirm('Move ' + name + ' from ' + seed.stage + ' to ' + to + '?', 'commands',
        command({action: 'Move', to}))));
    }
    if (['Culled', 'Cancelled', 'RolledBack'].includes(seed.stage)) {
      items.push(button('Recycle', () => confirm('Make ' + name + ' dormant again?', 'commands', command({action: 'Recycle'}))));
    }
    form.replaceChildren(...items);
  }

  function germination(at, seed, layer, name, command) {
    const kind = document.createElement('select'), slot = document.createElement('input');
    const label = (text, e) => { const l = document.createElement('label'); l.append(text + ' ', e); return l; };
    for (const k of (control.kinds || {})[seed.site] || []) kind.append(new Option(k, k));
    slot.type = 'number';
    slot.min = 1;
    const slots = layer.slots > 0; // elsewhere a blueprint has a size
    slot.value = slots ? Math.min(at.seed + 1, Math.max(1, layer.slots - 1)) : 1;
    const go = button('Germinate', () => confirm('Germinate a ' + kind.value + ' in ' + name + '?', 'commands',
      command({action: 'Germinate', kind: kind.value, [slots ? 'slot' : 'size']: Number(slot.value)})));
    go.id = 'germinate';
    return [label('Blueprint', kind), label(slots ? 'Slot' : 'Size', slot), go];
  }

  function panel() {
    const mode = document.createElement('select'), label = document.createElement('label');
    for (const m of ['Production', 'Sampling', 'Debug', 'Off']) mode.append(new Option(m, m));
    label.append('Telemetry ', mode);
    const save = button('Save now', () => confirm('Save a checkpoint behind this step?', 'save', {}));
    const stop = button('Stop', () => confirm('End the run behind this step, with a checkpoint if it has one?', 'stop', {}));
    save.id = 'save';
    stop.id = 'stop';
    const box = document.createElement('p');
    box.className = 'controls';
    box.append(save, stop, label, button('Change telemetry', () => confirm('Measure seeds in mode ' + mode.value + '?', 'telemetry',
      {mode: mode.value, every: mode.value === 'Sampling' ? 4 : 0})));
    $('control').replaceChildren(box);
    $('control-section').hidden = false;
  }

  async function learn() {
    try {
      control = await (await fetch('api/v1/control')).json();
    } catch { return; }
    if (token && control.allowed) panel();
  }

  function start() {
    const given = new URLSearchParams(location.hash.slice(1)).get('token');
    if (given) {
      sessionStorage.setItem('token', given);
      history.replaceState(null, '', location.pathname); // or it would be copied with the address
    }
    token = sessionStorage.getItem('token') || '';
    $('confirm-yes').addEventListener('click', send);
    $('confirm-no').addEventListener('click', () => $('confirm').close());
    learn();
  }

  return {start, seed, learn};
})();
