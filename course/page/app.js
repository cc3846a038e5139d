"use strict";
const client = new Client();
let ready = client.load(location.hash === "#plain");
